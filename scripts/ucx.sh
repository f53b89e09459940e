#!/bin/sh
# Installs Debian's UCX (2.6 MB), which KV blocks can move through, where apt and its rights are there. Never fails: without
# UCX everything builds and runs, and the tests that need it say that they did not run.
set -u
have() { /sbin/ldconfig -p 2>/dev/null | grep -q 'libucp\.so\.0'; }

if ! have && command -v apt-get >/dev/null && [ "$(id -u)" = 0 ]; then
    export DEBIAN_FRONTEND=noninteractive
    install="timeout 120 apt-get install -y --no-install-recommends libucx0"
    $install >/dev/null 2>&1 || { timeout 120 apt-get update >/dev/null 2>&1 && $install >/dev/null 2>&1; }
fi
if have; then echo "UCX is installed"; else echo "no UCX here: its tests will say that they did not run"; fi
exit 0
