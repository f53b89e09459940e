#!/bin/sh
# All tests: unit and property tests, whole-system tests with real processes, doc tests, the openai SDK.
# Takes the release binary for the processes when `make up` built one that is newer than every source, else builds it.
set -eu
cd "$(dirname "$0")/.."

stage() { printf '\n== %s\n' "$*" >&2; }

scripts/need.sh cargo cc
STARLING_TEST_MODEL=$(scripts/model.sh)
export STARLING_TEST_MODEL

stage "build of the program that the system tests start"
cargo build --release --locked --bin starling
STARLING_TEST_BINARY=$PWD/target/release/starling
export STARLING_TEST_BINARY

stage "tests"
if cargo nextest --version >/dev/null 2>&1; then
    cargo nextest run --locked --workspace --no-fail-fast
else
    cargo test --locked --workspace --lib --bins --tests --no-fail-fast
fi

stage "doc tests"
cargo test --locked --workspace --doc --quiet

stage "the openai SDK against a running node"
python=$(scripts/venv.sh)
"$python" tests/e2e/openai_sdk.py "$STARLING_TEST_BINARY" "$STARLING_TEST_MODEL"

stage "all tests passed"
