#!/bin/sh
# Fails when a source file has more than 500 production lines or a function more than 70.
set -eu
cd "$(dirname "$0")/.."
exec python3 scripts/size.py
