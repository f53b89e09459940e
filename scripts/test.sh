#!/bin/sh
# All tests: unit and property tests, whole-system tests with real processes, doc tests, the openai SDK.
# The processes run the release binary when `make up` built one that is newer than every source, else the one that
# cargo builds beside the tests; no second build is made for them.
set -eu
cd "$(dirname "$0")/.."

stage() { printf '\n== %s\n' "$*" >&2; }

scripts/need.sh cargo cc
STARLING_TEST_MODEL=$(scripts/model.sh)
export STARLING_TEST_MODEL

release=$(realpath -m "${CARGO_TARGET_DIR:-target}")/release/starling
newer() {
    find Cargo.toml Cargo.lock src cluster kv actors gateway -type f \( -name '*.rs' -o -name '*.toml' -o -name '*.lock' \) \
        -newer "$release" | head -n 1
}
if [ -x "$release" ] && [ -z "$(newer)" ]; then
    STARLING_TEST_BINARY=$release
    export STARLING_TEST_BINARY
    echo "system tests start $release" >&2
fi

# Tests that need a right which is not given say so here.
skipped=${CARGO_TARGET_DIR:-target}/tmp/skipped.txt
rm -f "$skipped"

stage "tests"
if cargo nextest --version >/dev/null 2>&1; then
    cargo nextest run --locked --workspace --no-fail-fast
else
    cargo build --locked -p starling --examples
    cargo test --locked --workspace --lib --bins --tests --no-fail-fast
fi

stage "doc tests"
cargo test --locked --workspace --doc --quiet

stage "the openai SDK against a running node"
python=$(scripts/venv.sh)
"$python" tests/e2e/openai_sdk.py "${STARLING_TEST_BINARY:-${CARGO_TARGET_DIR:-target}/debug/starling}" "$STARLING_TEST_MODEL"

stage "all tests passed"
if [ -s "$skipped" ]; then
    echo "$(wc -l <"$skipped") of them did not run here:" >&2
    cat "$skipped" >&2
fi
