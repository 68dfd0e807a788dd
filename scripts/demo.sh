#!/usr/bin/env bash
# One sandbox's whole life, through the command line: install what is missing,
# build, make the default template, start a daemon of its own (temporary state,
# free port), create, copy in, run, delete, stop. At its end the host is asked
# what is left. The template is kept in a cache directory between runs.
set -euo pipefail
cd "$(dirname "$0")/.."

began=$(date +%s%N)
demo='' daemon='' sandbox=''

seconds() { # since time $1 (ns)
	local ms=$((($(date +%s%N) - $1) / 1000000))
	printf '%d.%02d s' $((ms / 1000)) $((ms % 1000 / 10))
}

step() { # title, command…
	local title=$1 at
	shift
	printf '\n\033[1m▸ %s\033[0m\n' "$title"
	at=$(date +%s%N)
	"$@"
	printf '  %s\n' "[$(seconds "$at")]"
}

show() { # command…: print it as a person would type it, then run it
	printf '  $ cloche %s\n' "$*"
	cloche "$@" | sed 's/^/    /'
}

cloche() { "$PWD/bin/cloche" "$@"; }

# ---- what the host holds of this demo, by the host's own account ----

processes() { # named after the demo, run from its files, or in the sandbox's cgroup
	{
		# From a file of patterns: an argument would make grep find itself.
		# shellcheck disable=SC2062
		grep -lasF -f <(printf '%s\n' "$demo/" "${sandbox:-$demo/}") /proc/[0-9]*/cmdline /proc/[0-9]*/cgroup || true
		find /proc/[0-9]*/exe -maxdepth 0 -lname "$demo/*" 2>/dev/null || true
	} | cut -d/ -f3 | sort -un
}
mounts() { awk '{print $5}' /proc/self/mountinfo | grep -F "$demo/" || true; }
namespaces() { # pinned by a mount, or those of a process of the demo
	{
		awk '$4 ~ /^[a-z]+:\[/ {print $4, $5}' /proc/self/mountinfo | grep -F "$demo/" | cut -d' ' -f1
		local pid
		for pid in $(processes); do find "/proc/$pid/ns" -type l -printf '%l\n' 2>/dev/null; done |
			grep -vxF -f <(find /proc/self/ns -type l -printf '%l\n')
	} | sort -u || true
}
cgroups() { [ -z "$sandbox" ] || find /sys/fs/cgroup -type d -path "*$sandbox*" 2>/dev/null || true; }
files() {
	find "$demo/run" -mindepth 1 ! -type d 2>/dev/null || true
	[ -z "$sandbox" ] || find "$demo/state" -path "*$sandbox*" 2>/dev/null || true
}
count() { "$1" | wc -l; }
census() { printf '%s %s %s %s %s\n' "$(count processes)" "$(count mounts)" "$(count namespaces)" "$(count cgroups)" "$(count files)"; }

# ---- clean-up, whatever happened ----

stop_daemon() {
	[ -n "$daemon" ] || return 0
	kill -TERM "$daemon" 2>/dev/null || true
	local i
	for i in $(seq 100); do
		kill -0 "$daemon" 2>/dev/null || break
		[ "$i" -lt 100 ] || kill -KILL "$daemon"
		sleep 0.1
	done
	wait "$daemon" 2>/dev/null || true
	daemon=''
}

finish() {
	local code=$?
	trap - EXIT
	if [ -n "$demo" ]; then
		if [ $code -ne 0 ] && [ -s "$demo/log" ]; then
			printf '\nthe daemon said:\n' >&2
			tail -n 30 "$demo/log" >&2
		fi
		[ -z "$daemon" ] || [ -z "$sandbox" ] || cloche rm --force "$sandbox" >/dev/null 2>&1 || true
		stop_daemon
		local left
		for left in $(processes); do kill -KILL "$left" 2>/dev/null || true; done
		for left in $(mounts | sort -r); do umount -l "$left" 2>/dev/null || true; done
		rm -rf "$demo"
	fi
	exit $code
}

# ---- the steps ----

start() {
	local port
	until port=$((20000 + RANDOM % 20000)) && ! (exec 3<>"/dev/tcp/127.0.0.1/$port") 2>/dev/null; do :; done
	export CLOCHE_URL=http://127.0.0.1:$port
	printf '  $ cloche serve --listen 127.0.0.1:%s --state-dir … --run-dir …\n' "$port"
	bin/cloche serve --listen "127.0.0.1:$port" --state-dir "$demo/state" --run-dir "$demo/run" >"$demo/log" 2>&1 &
	daemon=$!
	local i
	for i in $(seq 300); do
		if [ -s "$demo/state/admin.key" ] && CLOCHE_API_KEY=$(cat "$demo/state/admin.key") cloche ls >/dev/null 2>&1; then
			CLOCHE_API_KEY=$(cat "$demo/state/admin.key")
			export CLOCHE_API_KEY
			return
		fi
		kill -0 "$daemon" 2>/dev/null || break
		sleep 0.1
	done
	echo "the daemon did not become ready" >&2
	return 1
}

# The cache is a whole state directory, named after the code that decides what
# is in it.
cache_root=${XDG_CACHE_HOME:-${HOME:-/var/tmp}/.cache}/cloche
cache=$cache_root/demo-$(find internal/sandbox/build.go internal/template internal/store internal/auth -type f \
	\( -name '*.go' -o -name '*.sql' \) ! -name '*_test.go' -print0 | sort -z | xargs -0 cat | sha256sum | cut -c 1-16)

template() {
	if cloche template ls | grep -q 'base:latest'; then
		echo "  kept from an earlier run in $cache"
	else
		printf '  $ cloche template build base\n'
		cloche template build base
	fi
	show template ls
}

keep_template() {
	[ ! -d "$cache" ] || return 0
	mkdir -p "$cache_root"
	rm -rf "$cache_root"/demo-*
	cp -a "$demo/state" "$cache.$$"
	mv "$cache.$$" "$cache"
}

create() {
	printf '  $ cloche create base\n'
	sandbox=$(cloche create --json --label demo=yes base | sed -n 's/.*"id": *"\(sbx_[a-z2-7]*\)".*/\1/p' | head -n 1)
	[ -n "$sandbox" ]
	echo "    $sandbox"
	show ls
}

program=$(
	cat <<'PYTHON'
import os, platform, sys, time
print(f"hello from {platform.node()}: kernel {platform.release()}, user {os.environ.get('USER', os.getuid())}, python {platform.python_version()}", flush=True)
for n in (10, 20, 30, 40):
    a, b = 0, 1
    for _ in range(n):
        a, b = b, a + b
    print(f"fib({n}) = {a}", flush=True)
    time.sleep(0.3)
print("to stderr, and away with exit code 7", file=sys.stderr, flush=True)
sys.exit(7)
PYTHON
)

copy() {
	printf '%s\n' "$program" >"$demo/program.py"
	show cp "$demo/program.py" "$sandbox:/tmp/program.py"
	show exec "$sandbox" -- ls -l /tmp/program.py
}

stream() {
	printf '  $ cloche exec %s -- python3 /tmp/program.py\n' "$sandbox"
	local at code
	at=$(date +%s%N)
	set +e
	cloche exec "$sandbox" -- python3 /tmp/program.py 2>&1 | while IFS= read -r line; do
		printf '    +%s  %s\n' "$(seconds "$at")" "$line"
	done
	code=${PIPESTATUS[0]}
	set -e
	echo "  exit code: $code"
	[ "$code" -eq 7 ]
}

main() {
	if [ "$(id -u)" -ne 0 ]; then
		echo "the demo needs root: machines are made of namespaces and cgroups. Try: sudo make demo" >&2
		exit 1
	fi
	step "install what is missing" scripts/deps.sh run
	step "build bin/cloche (the engine and the guest agent are inside)" make build

	demo=$(mktemp -d "${TMPDIR:-/tmp}/cloche-demo.XXXXXX")
	trap finish EXIT
	trap 'exit 130' INT TERM
	mkdir -p "$demo/run"
	[ ! -d "$cache" ] || cp -a "$cache" "$demo/state"
	local before during after
	before=$(census)

	step "start the daemon" start
	step "the default template: Debian with python3, git, curl, sudo" template
	step "create a sandbox" create
	step "copy a program into it" copy
	during=$(census)
	step "run the program; its lines arrive as they are printed" stream
	step "delete the sandbox" show rm "$sandbox"
	step "stop the daemon" stop_daemon
	keep_template
	after=$(census)

	printf '\n\033[1m▸ what the host holds of it\033[0m\n'
	{
		echo "when processes mounts namespaces cgroups files"
		echo "before $before"
		echo "during $during"
		echo "after $after"
	} | awk '{printf "  %-8s %10s %8s %11s %8s %7s\n", $1, $2, $3, $4, $5, $6}'
	if [ "$after" != "0 0 0 0 0" ]; then
		echo "something was left behind:" >&2
		{ processes | while read -r pid; do echo "$pid $(tr '\0' ' ' <"/proc/$pid/cmdline")"; done; mounts; namespaces; cgroups; files; } >&2
		exit 1
	fi
	printf '\nnothing is left. The whole demo took %s.\n' "$(seconds "$began")"
}

main
