#!/usr/bin/env bash
# Runs every fuzz target of the tree, each for the time given (default 30s).
set -euo pipefail
cd "$(dirname "$0")/.."
time=${1:-30s}
git grep -lE '^func Fuzz[A-Z]' -- '*_test.go' | while read -r file; do
	sed -nE 's/^func (Fuzz[A-Za-z0-9_]+)\(.*/\1/p' "$file" | while read -r target; do
		printf '=== %s %s\n' "$(dirname "$file")" "$target"
		go test -run '^$' -fuzz "^$target\$" -fuzztime "$time" -fuzzminimizetime 1x "./$(dirname "$file")"
	done
done
