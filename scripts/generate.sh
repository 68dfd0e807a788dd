#!/usr/bin/env bash
# Generates code from the .proto files and from api/openapi.yaml.
#   generate.sh          into the tree
#   generate.sh --check  elsewhere, and fails where the tree differs
set -euo pipefail
cd "$(dirname "$0")/.."
tools=$PWD/dist/tools
export PATH=$tools:$PATH

generate() { # into directory $1
	local out=$1 proto config target
	while read -r proto; do
		protoc -I "$(dirname "$proto")" \
			--go_out="$out" --go_opt=module=cloche.dev/cloche \
			--connect-go_out="$out" --connect-go_opt=module=cloche.dev/cloche \
			"$(basename "$proto")"
	done < <(git ls-files -co --exclude-standard -- '*.proto')
	# Each *.cfg.yaml names its output, beside itself; a name in the config would
	# win over -o, so it is taken out.
	while read -r config; do
		target=$(dirname "$config")/$(sed -n 's/^output: *//p' "$config")
		mkdir -p "$out/$(dirname "$target")"
		sed '/^output:/d' "$config" >"$scratch/cfg.yaml"
		"$tools/oapi-codegen" -config "$scratch/cfg.yaml" -o "$out/$target" api/openapi.yaml
	done < <(git ls-files -co --exclude-standard -- '*.cfg.yaml')
}

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
if [ "${1:-}" != --check ]; then
	generate .
	exit
fi

out=$scratch/tree
mkdir "$out"
generate "$out"
bad=0
while read -r file; do
	# protoc writes its own version into a comment; Debian's and Ubuntu's differ.
	if ! diff -q -I '^//[[:space:]]*protoc  ' "$out/$file" "$file" >/dev/null; then
		echo "$file is not what its source generates: run make generate"
		bad=1
	fi
done < <(cd "$out" && find . -type f -printf '%P\n' | sort)
exit $bad
