#!/bin/sh
# From a fresh clone to a running node: prerequisites, model, release build, `starling up`. Arguments go to `starling up`.
set -eu
cd "$(dirname "$0")/.."

scripts/need.sh cargo cc
scripts/model.sh >/dev/null
cargo build --release --locked --bin starling
exec "${CARGO_TARGET_DIR:-target}/release/starling" up "$@"
