"""NIXL's figures for the loads of bench/transfer, as lines of JSON.

    python nixl_peer.py --name NAME [--progress] [--polling] [--load 64k=65536,1,200 ...]     UCX_TLS chooses its transports

`--progress` starts its progress threads (its default); `--polling` lets the owner ask for notices all the time, which
is what drives transports that the owner's CPU must serve. Without either it asks once a millisecond.
`pip install nixl-cu12` (or nixl-cu13).
"""

import argparse
import base64
import importlib
import json
import os
import random
import select
import subprocess
import sys
import time

import numpy

MEMORY = 256 << 20


def api():
    for name in ("nixl._api", "nixl_cu12._api", "nixl_cu13._api"):
        try:
            return importlib.import_module(name)
        except ImportError:
            continue
    sys.exit("no nixl")


def memory():
    """A page-aligned buffer that is there."""
    whole = numpy.empty(MEMORY + 4096, dtype=numpy.uint8)
    start = -whole.ctypes.data % 4096
    part = whole[start:start + MEMORY]
    part[:] = 7
    return part


def agent(name, progress):
    nixl = api()
    return nixl.nixl_agent(name, nixl.nixl_agent_config(enable_prog_thread=progress, backends=["UCX"]))


def owner(options):
    ours, buffer = agent("owner", options.progress), memory()
    ours.register_memory([(buffer.ctypes.data, MEMORY, 0, "")], "DRAM")
    blob = base64.b64encode(ours.get_agent_metadata()).decode()
    print("OWNER", json.dumps({"metadata": blob, "address": buffer.ctypes.data}), flush=True)
    while not select.select([sys.stdin], [], [], 0)[0]:
        # Its connections are set up by whoever asks for notices, when no thread of its own does.
        ours.get_new_notifs()
        if not options.polling:
            time.sleep(0.001)


def places(page):
    count = MEMORY // page
    table = numpy.zeros((count, 3), dtype=numpy.uint64)
    table[:, 1] = page
    return count, table


def once(ours, operation, sides, indices, limit=30.0):
    """Seconds from the post to the end."""
    handle = ours.make_prepped_xfer(operation, sides[0], indices[0], sides[1], indices[1])
    start = time.perf_counter()
    state = ours.transfer(handle)
    while state == "PROC":
        state = ours.check_xfer_state(handle)
        if time.perf_counter() - start > limit:
            sys.exit("a transfer did not end")
    took = time.perf_counter() - start
    if state != "DONE":
        sys.exit(f"a transfer ended as {state}")
    ours.release_xfer_handle(handle)
    return took


def start(options):
    words = [sys.executable, __file__, "--name", options.name, "--owner"]
    words += ["--progress"] * options.progress + ["--polling"] * options.polling
    other = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    for line in other.stdout:
        if line.startswith("OWNER "):
            return other, json.loads(line[6:])
    sys.exit("the owner ended")


def connect(options):
    """(agent, the owner's process, prepare: page -> both sides' lists)."""
    ours, buffer = agent("initiator", options.progress), memory()
    ours.register_memory([(buffer.ctypes.data, MEMORY, 0, "")], "DRAM")
    other, hello = start(options)
    name = ours.add_remote_agent(base64.b64decode(hello["metadata"]))
    name = name.decode() if isinstance(name, bytes) else name

    def prepare(page):
        count, table = places(page)
        sides = []
        for who, base in (("NIXL_INIT_AGENT", buffer.ctypes.data), (name, hello["address"])):
            table[:, 0] = base + numpy.arange(count, dtype=numpy.uint64) * page
            sides.append(ours.prep_xfer_dlist(who, table.copy(), "DRAM"))
        return count, sides

    return ours, other, prepare, buffer


def measure(options):
    ours, other, prepare, _memory = connect(options)
    chance = random.Random(5)
    for load in options.load:
        label, numbers = load.split("=")
        page, pages, repeats = map(int, numbers.split(","))
        count, sides = prepare(page)
        for operation, direction in (("READ", "pull"), ("WRITE", "push")):
            ms = []
            for _ in range(repeats + 1):
                pick = [numpy.array(chance.sample(range(count), pages), dtype=numpy.int32) for _ in sides]
                ms.append(once(ours, operation, sides, pick) * 1e3)
            row = {"way": options.name, "direction": direction, "load": label, "bytes": page * pages, "ms": ms[1:]}
            print(json.dumps(row), flush=True)
    other.kill()
    other.wait()
    # The agent's own end waits for the owner, which is gone.
    os._exit(0)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--name", required=True)
    for flag in ("--progress", "--polling", "--owner"):
        parser.add_argument(flag, action="store_true")
    parser.add_argument("--load", action="append", default=[])
    options = parser.parse_args()
    if options.owner:
        owner(options)
    else:
        measure(options)


if __name__ == "__main__":
    main()
