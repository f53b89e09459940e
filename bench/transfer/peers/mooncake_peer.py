"""Mooncake's transfer engine over TCP on the loads of bench/transfer, as lines of JSON.

    python mooncake_peer.py --name NAME [--load 64k=65536,1,200 ...]

`pip install mooncake-transfer-engine-non-cuda`.
"""

import argparse
import json
import random
import subprocess
import sys
import time

import numpy
from mooncake.engine import TransferEngine

MEMORY = 256 << 20


def memory():
    """A page-aligned buffer that is there."""
    whole = numpy.empty(MEMORY + 4096, dtype=numpy.uint8)
    start = -whole.ctypes.data % 4096
    part = whole[start:start + MEMORY]
    part[:] = 7
    return part


def engine(buffer):
    made = TransferEngine()
    if made.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") != 0:
        sys.exit("the engine does not start")
    if made.register_memory(buffer.ctypes.data, MEMORY) != 0:
        sys.exit("the memory is not registered")
    return made


def owner():
    buffer = memory()
    made = engine(buffer)
    hello = {"peer": f"127.0.0.1:{made.get_rpc_port()}", "address": buffer.ctypes.data}
    print("OWNER", json.dumps(hello), flush=True)
    sys.stdin.read()


def start():
    other = subprocess.Popen([sys.executable, __file__, "--name", "owner", "--owner"], stdin=subprocess.PIPE,
                             stdout=subprocess.PIPE, text=True)
    for line in other.stdout:
        if line.startswith("OWNER "):
            return other, json.loads(line[6:])
    sys.exit("the owner ended")


def measure(options):
    buffer = memory()
    made = engine(buffer)
    other, hello = start()
    chance = random.Random(5)
    for load in options.load:
        label, numbers = load.split("=")
        page, pages, repeats = map(int, numbers.split(","))
        places = range(MEMORY // page)
        for direction, move in (("pull", made.batch_transfer_sync_read), ("push", made.batch_transfer_sync_write)):
            ms = []
            for _ in range(repeats + 1):
                here = [buffer.ctypes.data + at * page for at in chance.sample(places, pages)]
                there = [hello["address"] + at * page for at in chance.sample(places, pages)]
                begin = time.perf_counter()
                if move(hello["peer"], here, there, [page] * pages) != 0:
                    sys.exit("a transfer failed")
                ms.append((time.perf_counter() - begin) * 1e3)
            row = {"way": options.name, "direction": direction, "load": label, "bytes": page * pages, "ms": ms[1:]}
            print(json.dumps(row), flush=True)
    other.kill()
    other.wait()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--name", required=True)
    parser.add_argument("--owner", action="store_true")
    parser.add_argument("--load", action="append", default=[])
    options = parser.parse_args()
    owner() if options.owner else measure(options)


if __name__ == "__main__":
    main()
