#!/usr/bin/env bash
# Runs the named suites one after the other, each to its end whatever the
# others did, and closes with the tables and the line that adds them up.
set -uo pipefail
cd "$(dirname "$0")/.." || exit

rm -rf dist/test
mkdir -p dist/test
make deps && make build dist/testreport || exit 1

summaries=()
for suite in "$@"; do
	printf '\n##### %s\n' "$suite"
	make "$suite"
	summaries+=("dist/test/$suite.json")
done
exec dist/testreport -total "${summaries[@]}"
