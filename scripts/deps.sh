#!/usr/bin/env bash
# Installs what the Makefile's targets need and is missing: Debian packages by
# apt-get, and a Python environment for schemathesis from a file with hashes.
#   deps.sh run     what Cloche itself needs to build templates
#   deps.sh nested  what make e2e-firecracker needs
#   deps.sh all     these, and what checks and tests need; without those of
#                   nested, where they can't be had, it still succeeds
set -euo pipefail
cd "$(dirname "$0")/.."

go_least=1.26.3

say() { printf '%s\n' "$*" >&2; }

need_go() {
	if ! command -v go >/dev/null; then
		say "deps: Go is missing: install Go $go_least or newer and put it in PATH"
		exit 1
	fi
	local have
	have=$(go env GOVERSION)
	have=${have#go}
	if [ "$(printf '%s\n%s\n' "$go_least" "${have%% *}" | sort -V | head -n 1)" != "$go_least" ]; then
		say "deps: Go $have is too old: Cloche needs $go_least or newer"
		exit 1
	fi
}

# missing prints the packages whose command or file is not there.
missing() {
	local pair
	for pair in "$@"; do
		local package=${pair%%=*} probe=${pair#*=}
		if [[ $probe == /* ]]; then
			[ -e "$probe" ] || echo "$package"
		else
			command -v "$probe" >/dev/null || echo "$package"
		fi
	done
}

install() {
	[ $# -gt 0 ] || return 0
	if ! command -v apt-get >/dev/null; then
		say "deps: this machine has no apt-get; install these by hand: $*"
		exit 1
	fi
	if [ "$(id -u)" -ne 0 ]; then
		say "deps: missing packages; as root run: apt-get install --no-install-recommends $*"
		exit 1
	fi
	say "deps: installing $*"
	local log
	log=$(mktemp)
	# An index that is there but old is the common case on images: try without
	# an update first, then with one.
	if ! apt_get install "$@" >"$log" 2>&1; then
		if ! { apt_get update && apt_get install "$@"; } >"$log" 2>&1; then
			cat "$log" >&2
			rm -f "$log"
			exit 1
		fi
	fi
	rm -f "$log"
}

apt_get() {
	local verb=$1
	shift
	DEBIAN_FRONTEND=noninteractive apt-get -q -y -o DPkg::Lock::Timeout=120 --no-install-recommends "$verb" "$@"
}

python_environment() {
	local env=dist/python want
	want=$(sha256sum tools/requirements.txt | cut -d' ' -f1)
	[ "$(cat "$env/.cloche" 2>/dev/null)" != "$want" ] || return 0
	say "deps: making the Python environment for schemathesis"
	rm -rf "$env"
	python3 -m venv "$env"
	"$env/bin/pip" -q --disable-pip-version-check install --require-hashes --only-binary :all: -r tools/requirements.txt
	echo "$want" >"$env/.cloche"
}

nested() {
	local list
	mapfile -t list < <(
		missing "${nested_packages[@]}"
		busybox_is_static || echo busybox-static
		python3 -m pip --version >/dev/null 2>&1 || dist/python/bin/pip --version >/dev/null 2>&1 || echo python3-pip
	)
	install "${list[@]}"
}

# The packages busybox and busybox-static have the same file.
busybox_is_static() {
	local file
	file=$(command -v busybox) && ! ldd "$file" >/dev/null 2>&1
}

run_packages=(mmdebstrap=mmdebstrap uidmap=newuidmap ca-certificates=/etc/ssl/certs/ca-certificates.crt git=git)
all_packages=(erofs-utils=mkfs.erofs protobuf-compiler=protoc gcc=gcc libc6-dev=/usr/include/stdlib.h
	shellcheck=shellcheck python3=python3 systemd=systemd-analyze)
nested_packages=(qemu-system-x86=qemu-system-x86_64 e2fsprogs=mkfs.ext4 erofs-utils=mkfs.erofs python3=python3)

need_go
case ${1:-all} in
run)
	mapfile -t list < <(missing "${run_packages[@]}")
	install "${list[@]}"
	;;
all)
	mapfile -t list < <(
		missing "${run_packages[@]}" "${all_packages[@]}"
		python3 -c 'import ensurepip, venv' 2>/dev/null || echo python3-venv
	)
	install "${list[@]}"
	python_environment
	(nested) || say "deps: make e2e-firecracker will skip what needs these"
	;;
nested)
	nested
	;;
*)
	say "usage: deps.sh run|nested|all"
	exit 2
	;;
esac
