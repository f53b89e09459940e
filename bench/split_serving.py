"""Split serving against one worker that does both, with the real model: time to the first token, and what running answers feel of it.

  python3 bench/split_serving.py [--binary target/release/starling] [--model FILE] [--tokens 1500] [--prompts 5] [--streams 2] [--beside 2] [--threads] [--no-whole]

One node whose worker does everything; then a decode node (with the gateway) and a prefill node; then, as a control, two nodes
that know nothing of each other, the second of which computes the same prompts for itself: what running answers lose there is
the machine's share (caches, memory, clock), not the hand-over's. Every process computes with one thread, so that two of them
fit on two cores. In each arrangement long prompts go one after another to idle workers, which gives TTFT; then some answers
run, and `--beside` long prompts come beside them: the time between two pieces of those answers while a prompt is computed is
its ITL. An answer's steps become longer with every token (10 ms at the beginning, 18 ms 1,000 tokens later), so each of those
spans is compared with the mean of the seconds of rest just before and just after it. Prints all of it, the KV bytes of a prompt, the bandwidth that the transfer agent measured,
and the bar: TTFT at most that of the one worker + 1.3 x bytes / bandwidth + 5 ms. `--threads` also prints what each thread of
the nodes and this client itself computed and how long it waited for a core. The texts must be the same. Nothing but the
standard library.
"""

import argparse
import collections
import os
import pathlib
import signal
import statistics
import threading
import time

from nodes import Cluster, Stream, metric, prompt

WHOLE, SPLIT, CONTROL = "one worker", "prefill and decode", "two strangers"
SOURCED = r'starling_worker_sourced_total\{kind="split",outcome="complete"\}'
BYTES = r"starling_transfer_bytes_total"
RATE = r"starling_transfer_bytes_per_second"


def nodes(arguments, kind):
    same = ["--workers", "1", "--threads", "1"] + (["--model", arguments.model] if arguments.model else [])
    cluster = Cluster(arguments.binary, "split-serving")
    cluster.add("box", "--worker-role", "decode" if kind == SPLIT else "both", *same)
    if kind == CONTROL:
        cluster.add("far", "--worker-role", "both", *same, alone=True)
    elif kind == SPLIT:
        cluster.add("far", "--role", "worker", "--worker-role", "prefill", *same)
    return cluster.ready(2 if kind == SPLIT else 1)


def gaps(streams, begin, end):
    return [b - a for stream in streams for a, b in zip(stream.times, stream.times[1:]) if begin <= a and b <= end]


def spent(found):
    """By thread name: (nanoseconds on a core, nanoseconds ready but waiting, times put on a core); this client as one thread."""
    total = collections.defaultdict(lambda: [0, 0, 0])
    for place, pid in [("client", os.getpid())] + [(name, node.pid) for name, (node, _) in zip(("box", "far"), found)]:
        for task in pathlib.Path(f"/proc/{pid}/task").iterdir():
            try:
                numbers = [int(word) for word in (task / "schedstat").read_text().split()]
                name = f"{place} {(task / 'comm').read_text().strip() if place != 'client' else ''}"
            except OSError:
                continue
            total[name] = [a + b for a, b in zip(total[name], numbers)]
    return total


def busy_seconds():
    """What all cores together computed, whoever asked for it."""
    words = pathlib.Path("/proc/stat").read_text().split("\n")[0].split()
    return sum(int(words[at]) for at in (1, 2, 3, 6, 7)) / os.sysconf("SC_CLK_TCK")


class Spans:
    """Collects gaps, and what the threads did, over spans of one kind."""

    def __init__(self, streams, found):
        self.streams, self.found, self.gaps, self.means, self.seconds, self.others = streams, found, [], [], 0.0, 0.0
        self.threads = collections.defaultdict(lambda: [0, 0, 0])

    def over(self, what):
        before, begun, busy = spent(self.found), time.perf_counter(), busy_seconds()
        result = what()
        ended, after = time.perf_counter(), spent(self.found)
        ours = sum(after[name][0] - before[name][0] for name in after)
        self.others += busy_seconds() - busy - 1e-9 * ours
        self.gaps += gaps(self.streams, begun, ended)
        self.means.append(statistics.mean(gaps(self.streams, begun, ended)))
        self.seconds += ended - begun
        for name, numbers in after.items():
            self.threads[name] = [t + a - b for t, a, b in zip(self.threads[name], numbers, before[name])]
        return result

    def print(self, what, threads):
        print(f"  ITL of running answers {what}: mean {1e3 * statistics.mean(self.gaps):.2f}, p50 {1e3 * statistics.median(self.gaps):.2f}, "
              f"p99 {1e3 * percentile(self.gaps, 0.99):.1f}, longest {1e3 * max(self.gaps):.1f} ms ({len(self.gaps)} gaps); "
              f"other processes took {100 * self.others / self.seconds:.0f} % of a core", flush=True)
        for name, (ran, waited, times) in sorted(self.threads.items(), key=lambda row: -row[1][0]) if threads else []:
            if ran > 1e6 * self.seconds:
                print(f"    {name:24} {1e-7 * ran / self.seconds:5.1f} % of a core, waited {1e-7 * waited / self.seconds:4.1f} %, "
                      f"{times / self.seconds:6.0f} turns a second")


def percentile(values, share):
    values = sorted(values)
    return values[min(len(values) - 1, int(len(values) * share))]


def measure(arguments, kind):
    cluster = nodes(arguments, kind)
    found, model = cluster.nodes, cluster.model
    try:
        address, prompts = found[0][1]["http"], found[-1 if kind == CONTROL else 0][1]["http"]
        for seed in range(4):
            Stream(address, model, prompt(100, 50 + seed), 32).read()
        Stream(prompts, model, prompt(300, 60), 4).read()
        before = metric(found, BYTES), metric(found, SOURCED)
        quiet = [Stream(prompts, model, prompt(arguments.tokens, 100 + seed), 16).read() for seed in range(arguments.prompts)]
        came, splits = metric(found, BYTES) - before[0], metric(found, SOURCED) - before[1]
        rate = metric(found, RATE)
        streams = [Stream(address, model, prompt(60, 200 + seed), 1500) for seed in range(arguments.streams)]
        threads = [threading.Thread(target=stream.follow, daemon=True) for stream in streams]
        for thread in threads:
            thread.start()
        while any(len(getattr(stream, "times", [])) < 20 for stream in streams):
            time.sleep(0.01)
        rest, beside = Spans(streams, found), Spans(streams, found)
        busy = []
        for seed in range(arguments.beside):
            rest.over(lambda: time.sleep(1))
            busy.append(beside.over(lambda: Stream(prompts, model, prompt(arguments.tokens, 300 + seed), 2).read()))
            rest.over(lambda: time.sleep(1))
        still = all(thread.is_alive() for thread in threads)
        for stream in streams:
            stream.leave()
    finally:
        cluster.end()
    ttft = statistics.median(stream.first for stream in quiet)
    print(f"{kind}: TTFT p50 {ttft:.0f} ms ({min(s.first for s in quiet):.0f} to {max(s.first for s in quiet):.0f}), beside {len(streams)} answers "
          f"{statistics.median(s.first for s in busy):.0f} ms; {splits:.0f} of {arguments.prompts} split", flush=True)
    rest.print("at rest", arguments.threads)
    beside.print("while prompts are computed", arguments.threads)
    if not still:
        print("  the running answers ended too early: these are not ITL beside all prompts")
    ratios = [mean / statistics.mean(rest.means[2 * at:2 * at + 2]) for at, mean in enumerate(beside.means)]
    print(f"  each span beside a prompt against its seconds of rest: {', '.join(f'{ratio:.3f}' for ratio in ratios)}", flush=True)
    return ttft, [stream.text for stream in quiet], (came / arguments.prompts, rate), statistics.mean(ratios)


def main():
    signal.signal(signal.SIGTERM, lambda *_: exit(1))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--binary", default="target/release/starling")
    parser.add_argument("--model")
    parser.add_argument("--tokens", type=int, default=1500)
    parser.add_argument("--prompts", type=int, default=5)
    parser.add_argument("--streams", type=int, default=2)
    parser.add_argument("--beside", type=int, default=2)
    parser.add_argument("--threads", action="store_true")
    parser.add_argument("--no-whole", action="store_true", help="leave the one worker out")
    arguments = parser.parse_args()
    found = {kind: measure(arguments, kind) for kind in [WHOLE, SPLIT, CONTROL] if not (arguments.no_whole and kind == WHOLE)}
    ttft, split_texts, (size, rate), parts = found[SPLIT]
    moving = 1e3 * size / rate if rate else float("nan")
    print(f"{size / 2**20:.1f} MiB a prompt at {rate / 1e9:.2f} GB/s: {moving:.1f} ms")
    if WHOLE in found:
        local, texts, _, whole = found[WHOLE]
        same = sum(a == b for a, b in zip(texts, split_texts))
        print(f"TTFT {ttft:.0f} ms, bar {local:.0f} + 1.3 x {moving:.1f} + 5 = {local + 1.3 * moving + 5:.0f} ms; {same} of {len(texts)} texts the same; "
              f"ITL on the one worker {whole:.1f} x while prompts are computed")
    print(f"ITL while prompts are computed {parts:.3f} x, beside a stranger that computes them {found[CONTROL][3]:.3f} x")


if __name__ == "__main__":
    main()
