#!/usr/bin/env bash
# Installs what the nested tests need, tests their machine's parts, and runs
# the suites in it. What it prints is for dist/testreport: the events of
# go test -json. Arguments are those of test/nested/run. What can't be installed
# is not said here: the command tells what of it is missing as skipped tests.
set -uo pipefail
cd "$(dirname "$0")/.." || exit

scripts/deps.sh nested >&2
code=0
go test -json -count=1 ./test/nested || code=1
mkdir -p dist/nested && go build -o dist/nested/run ./test/nested/run || exit
# Its own status is the more telling one.
dist/nested/run "$@" || code=$?
exit $code
