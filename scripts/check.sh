#!/usr/bin/env bash
# Static checks. Each runs whatever the others found; a check whose data can't
# be had is skipped loudly. What it prints is for dist/testreport: a line of
# JSON when a check begins and ends, in the form of go test -json.
set -uo pipefail
cd "$(dirname "$0")/.." || exit
tools=$PWD/dist/tools
log=$(mktemp)
trap 'rm -f "$log"' EXIT

event() { # action, check, seconds, one line of output without quotes
	printf '{"Action":"%s","Package":"check","Test":"%s","Elapsed":%d,"Output":"%s\\n"}\n' "$1" "$2" "${3:-0}" "${4:-}"
}

check() { # name, command…
	local name=$1 at=$SECONDS
	shift
	event run "$name"
	if "$@" >"$log" 2>&1; then
		event pass "$name" $((SECONDS - at))
	else
		printf -- '--- FAIL: %s (%ds)\n' "$name" $((SECONDS - at))
		cat "$log"
		event fail "$name"
	fi
}

own_go() { git ls-files -co --exclude-standard -- '*.go' | grep -vE '\.(pb|connect|gen)\.go$'; }

formatted() {
	local list
	list=$(own_go | xargs "$tools/gofumpt" -l)
	[ -z "$list" ] || { printf 'not formatted by gofumpt:\n%s\n' "$list"; return 1; }
}

tidy() { go mod tidy -diff && go -C tools mod verify; }

vulnerabilities() {
	"$tools/govulncheck" ./... >"$log" 2>&1 && { check govulncheck true; return; }
	if grep -q 'fetching vulnerabilities' "$log"; then
		event run govulncheck
		event output govulncheck 0 "SKIP: NOT CHECKED: the vulnerability database can't be reached from here"
		event skip govulncheck
	else
		check govulncheck "$tools/govulncheck" ./...
	fi
}

check gofumpt formatted
check vet go vet ./...
check golangci-lint "$tools/golangci-lint" run --allow-parallel-runners ./...
check house go test -count=1 ./internal/house/...
check generated scripts/generate.sh --check
check mod-tidy tidy
check shellcheck shellcheck scripts/*.sh .ci/run test/nested/l1/*
vulnerabilities
