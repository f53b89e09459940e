"""Our prefix index beside dynamo-kv-router 1.6.1's, on the same recorded operations: one table with ratios.

Builds nothing. Before: `cargo build --release -p starling-bench --bin index` and, in bench/peers/dynamo-index,
`cargo build --release`. Then:

    python3 bench/compare_index.py --ours target/release/index --theirs bench/peers/dynamo-index/target/release/dynamo-index \
        --trace conversation_trace.jsonl

Pairs are interleaved, each run is a process of its own, figures are medians, ratios are medians of the ratios of pairs.
CPU time per block operation stands beside each rate: on a machine that others use, it says more.
"""

import argparse
import json
import os
import statistics
import subprocess
import tempfile

# Workers, blocks of each one's cache (16 tokens each), threads that write.
LOADS = [(16, 16_384, 1), (16, 16_384, 2), (128, 16_384, 1), (128, 16_384, 2)]


def run(program, *words):
    answer = subprocess.run([program, *map(str, words)], check=True, capture_output=True, text=True).stdout
    return json.loads(answer.strip().splitlines()[-1])


def pairs(options, *words):
    """Interleaved runs of both: a list of (ours, theirs)."""
    return [(run(options.ours, *words), run(options.theirs, *words)) for _ in range(options.pairs)]


def row(name, found, key, unit, scale=1.0, higher=True):
    """One line of the table: medians and the median ratio, above 1 when ours is better."""
    ours, theirs = ([pair[side][key] / scale for pair in found] for side in (0, 1))
    ratio = statistics.median(o / t if higher else t / o for o, t in zip(ours, theirs))
    print(f"| {name} | {statistics.median(ours):.3g} {unit} | {statistics.median(theirs):.3g} {unit} | {ratio:.2f} × |", flush=True)
    return statistics.median(theirs)


def rates(options, log):
    """Block operations and events alone, as fast as they go."""
    for workers, lru, threads in LOADS:
        name = f"{workers} workers, {threads} writing"
        found = pairs(options, "closed", log(workers, lru), "--threads", threads)
        row(f"{name}: block-ops, closed loop", found, "rate", "M/s", 1e6)
        row(f"{name}: CPU per block-op", found, "cpu_ns_per_block", "ns", higher=False)
        found = pairs(options, "apply", log(workers, lru), "--threads", threads)
        row(f"{name}: events alone", found, "rate", "M blocks/s", 1e6)
        row(f"{name}: CPU per block of an event", found, "cpu_ns_per_block", "ns", higher=False)


def lookups(options, log):
    """Look-ups at half of their ceiling, in the order of the trace, and at rest."""
    for workers, lru in [(16, 16_384), (128, 16_384), (64, 32_768)]:
        closed = [run(options.theirs, "closed", log(workers, lru))["rate"] for _ in range(options.pairs)]
        found = pairs(options, "paced", log(workers, lru), "--rate", statistics.median(closed) / 2)
        for share in ("p50", "p99", "p999"):
            row(f"{workers} workers, half of their ceiling: lookup {share}", found, f"{share}_us", "µs", higher=False)
        found = pairs(options, "order", log(workers, lru))
        for share in ("p50", "p99"):
            row(f"{workers} workers, in order: lookup {share}", found, f"{share}_us", "µs", higher=False)
        found = pairs(options, "rest", log(workers, lru))
        row(f"{workers} workers, at rest: lookups", found, "lookups_per_s", "k/s", 1e3)


def memory(options, log):
    """Heap for each live block, and whether the scores are right."""
    for workers, lru in [(16, 16_384), (128, 16_384)]:
        found = [(run(options.ours, "memory", log(workers, lru)), run(options.theirs, "memory", log(workers, lru)))]
        row(f"{workers} workers: heap per live block before the first eviction", found, "before", "B", higher=False)
        row(f"{workers} workers: heap per live block after the trace", found, "after", "B", higher=False)
        for side, program in (("ours", options.ours), ("theirs", options.theirs)):
            asked = run(program, "check", log(workers, lru))
            print(f"{workers} workers, scores unlike the oracle's, {side}: {asked['wrong']} of {asked['asked']}")


PARTS = {"rates": rates, "lookups": lookups, "memory": memory}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ours", required=True)
    parser.add_argument("--theirs", required=True)
    parser.add_argument("--trace", required=True)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--part", choices=PARTS, action="append", help="one part alone; several times for several")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:

        def log(workers, lru):
            path = os.path.join(folder, f"{workers}-{lru}.log")
            if not os.path.exists(path):
                run(options.ours, "record", "--trace", options.trace, "--workers", workers, "--lru", lru, "--out", path)
            return path

        print(f"machine: {open('/proc/cpuinfo').read().split('model name')[1].splitlines()[0].strip(': ')}, "
              f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, {options.pairs} pairs")
        print("| | ours | theirs | better by |\n|---|---|---|---|")
        for part in options.part or PARTS:
            PARTS[part](options, log)


if __name__ == "__main__":
    main()
