"""Our choice of a worker beside dynamo-kv-router 1.6.1's, on the same loads and hits: one table with ratios.

Builds nothing. Before: `cargo build --release -p starling-bench --bin selection` and, in bench/peers/dynamo-index,
`cargo build --release --bin selection`. Then:

    python3 bench/compare_selection.py --ours target/release/selection --theirs bench/peers/dynamo-index/target/release/selection

Pairs are interleaved, each run is a process of its own, figures are medians, ratios are medians of the ratios of pairs.
`choose` is the selection alone; theirs has nothing that compares to `decide` and `whole`, which stand for the whole decision.
"""

import argparse
import json
import os
import statistics
import subprocess

WORKERS = [32, 1_024, 10_000]
# What a selection may take of theirs, and a whole decision for a prompt of 10,000 tokens, microseconds.
SHARE = 0.5
WHOLE = {32: 20, 1_024: 60, 10_000: 200}


def run(program, *words):
    """The rows of one run by (what, policy, workers)."""
    answer = subprocess.run([program, *map(str, words)], check=True, capture_output=True, text=True).stdout
    rows = [json.loads(line) for line in answer.splitlines() if line.startswith("{")]
    return {(row["what"], row.get("policy", "theirs"), row["workers"]): row for row in rows}


def verdict(met):
    return "met" if met else "**missed**"


def selection(workers, pairs):
    """The choice alone: theirs, then each of our policies beside it."""
    theirs = [pair[1]["choose", "theirs", workers] for pair in pairs]
    for policy in sorted({policy for what, policy, count in pairs[0][0] if (what, count) == ("choose", workers)}):
        ours = [pair[0]["choose", policy, workers] for pair in pairs]
        cells = []
        for share in ("p50_ns", "p99_ns"):
            mid = [statistics.median(row[share] for row in rows) / 1e3 for rows in (ours, theirs)]
            ratio = statistics.median(o[share] / t[share] for o, t in zip(ours, theirs))
            cells += [f"{mid[0]:.3g} µs", f"{mid[1]:.3g} µs", f"{ratio:.2f}"]
            if share == "p50_ns":
                cells.append(verdict(ratio <= SHARE) if policy == "starling" else "")
        print(f"| choose, `{policy}`, {workers} workers | " + " | ".join(cells) + " |")


def whole(workers, pairs):
    """A decision with all that a shard does, p50 and p99 of ours alone."""
    for what in ("decide", "whole-few", "whole-all"):
        rows = [pair[0][what, "starling", workers] for pair in pairs]
        p50, p99 = (statistics.median(row[share] for row in rows) / 1e3 for share in ("p50_ns", "p99_ns"))
        bar = verdict(p50 <= WHOLE[workers]) + f" ({WHOLE[workers]} µs)" if what != "decide" else ""
        print(f"| {what}, {workers} workers | {p50:.3g} µs | {p99:.3g} µs | {bar} |")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ours", required=True)
    parser.add_argument("--theirs", required=True)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--samples", type=int, default=1_000)
    options = parser.parse_args()
    words = ("--workers", ",".join(map(str, WORKERS)), "--samples", options.samples)
    print(f"machine: {open('/proc/cpuinfo').read().split('model name')[1].splitlines()[0].strip(': ')}, "
          f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, {options.pairs} pairs")
    pairs = []
    for _ in range(options.pairs):
        ours = run(options.ours, *words) | run(options.ours, *words, "--policy", "dynamo")
        pairs.append((ours, run(options.theirs, *words)))
    print("\n| | ours p50 | theirs p50 | ratio | bar 0.5 | ours p99 | theirs p99 | ratio |\n|---|---|---|---|---|---|---|---|")
    for workers in WORKERS:
        selection(workers, pairs)
    print("\n| the whole decision | p50 | p99 | bar |\n|---|---|---|---|")
    for workers in WORKERS:
        whole(workers, pairs)


if __name__ == "__main__":
    main()
