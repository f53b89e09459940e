#!/bin/sh
# Makes the Python environment of the client tests once: .venv with the openai SDK. Prints its python.
set -eu

root=$(cd "$(dirname "$0")/.." && pwd)
want="openai==3.57.0"
mark=$root/.venv/ready

if [ ! -f "$mark" ] || [ "$(cat "$mark")" != "$want" ]; then
    "$root/scripts/need.sh" python3 venv
    rm -rf "$root/.venv"
    echo "making .venv with $want" >&2
    python3 -m venv "$root/.venv" >&2
    "$root/.venv/bin/python" -m pip install --quiet --disable-pip-version-check "$want" >&2
    echo "$want" >"$mark"
fi
echo "$root/.venv/bin/python"
