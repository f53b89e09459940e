#!/bin/sh
# Checks what a build or a test needs; installs Debian packages when that is possible, otherwise says in one line what
# to install. Usage: need.sh cc python3 pip ...
set -eu

say() { printf '%s\n' "$*" >&2; }

# need COMMAND-THAT-SUCCEEDS PACKAGE WHAT
need() {
    if sh -c "$1" >/dev/null 2>&1; then return 0; fi
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
        say "installing $2 ($3)"
        if { apt-get install -y --no-install-recommends "$2" || { apt-get update && apt-get install -y --no-install-recommends "$2"; }; } >/tmp/starling-apt.$$ 2>&1 &&
            sh -c "$1" >/dev/null 2>&1; then
            rm -f /tmp/starling-apt.$$
            return 0
        fi
        tail -n 3 /tmp/starling-apt.$$ >&2
        rm -f /tmp/starling-apt.$$
    fi
    say "missing: $3. On Debian or Ubuntu: sudo apt-get install -y $2"
    exit 1
}

for what in "$@"; do
    case "$what" in
    cargo)
        command -v cargo >/dev/null 2>&1 || { say "missing: Rust 1.89 or newer. Install it from https://rustup.rs"; exit 1; }
        version=$(rustc --version | sed 's/^rustc 1\.\([0-9]*\)\..*/\1/')
        [ "$version" -ge 89 ] 2>/dev/null || { say "too old: $(rustc --version), needed: 1.89 or newer. Run: rustup update stable"; exit 1; }
        ;;
    cc) need 'command -v cc' build-essential 'a C compiler' ;;
    cmake) need 'command -v cmake' cmake 'cmake' ;;
    python3) need 'command -v python3' python3 'Python 3.9 or newer' ;;
    pip) need 'python3 -m pip --version' python3-pip 'pip' ;;
    venv) need 'python3 -c "import venv, ensurepip"' python3-venv 'the Python module venv' ;;
    *) say "need.sh: unknown: $what"; exit 2 ;;
    esac
done
