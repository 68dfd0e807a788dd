#!/bin/sh
# Fuzzes a running daemon against api/openapi.yaml with schemathesis: no
# undocumented status, content type, header or schema, no 500, nothing that is
# wrong is let through, and every operation answers 2xx at least once.
#
#   CLOCHE_URL=http://127.0.0.1:7070 CLOCHE_API_KEY=… test/schemathesis/run.sh
#
# CLOCHE_API_KEY is an admin key. CLOCHE_TEMPLATE names a template with
# /bin/cat and python3 (default: base). FUZZ_EXAMPLES (default 40) is how many
# cases each operation gets, FUZZ_DIR (default: dist/schemathesis) where the
# tool and its reports go. Other arguments go to schemathesis.
set -eu

root=$(cd "$(dirname "$0")/../.." && pwd)
here=$root/test/schemathesis
dir=${FUZZ_DIR:-$root/dist/schemathesis}
version=4.32.5

: "${CLOCHE_URL:?names no daemon}" "${CLOCHE_API_KEY:?names no admin key}"
CLOCHE_TEMPLATE=${CLOCHE_TEMPLATE:-base}
FUZZ_COUNTS=$dir/counts.json
SCHEMATHESIS_HOOKS=hooks
PYTHONPATH=$here
PYTHONDONTWRITEBYTECODE=1
export CLOCHE_URL CLOCHE_API_KEY CLOCHE_TEMPLATE FUZZ_COUNTS SCHEMATHESIS_HOOKS PYTHONPATH PYTHONDONTWRITEBYTECODE

mkdir -p "$dir"
venv=$root/dist/python # made by `make deps`
if [ ! -x "$venv/bin/st" ]; then
    venv=$dir/venv-$version
fi
if [ ! -x "$venv/bin/st" ]; then
    python3 -m venv "$venv"
    "$venv/bin/pip" -q --disable-pip-version-check install "schemathesis==$version"
fi

failed=0
(cd "$dir" && "$venv/bin/st" --config-file "$here/schemathesis.toml" run "$root/api/openapi.yaml" \
    --url "$CLOCHE_URL" --header "Authorization: Bearer $CLOCHE_API_KEY" \
    --exclude-operation-id drainHost --max-examples "${FUZZ_EXAMPLES:-40}" --report junit --report-dir "$dir/report" "$@") || failed=1
"$venv/bin/python" "$here/verdict.py" "$root/api/openapi.yaml" "$FUZZ_COUNTS" || failed=1
exit "$failed"
