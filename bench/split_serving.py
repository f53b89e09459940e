"""Split serving against one worker that does both, with the real model: time to the first token, and what running answers feel of it.

  python3 bench/split_serving.py [--binary target/release/starling] [--model FILE] [--tokens 1500] [--prompts 5] [--streams 2]

One node whose worker does everything; then a decode node (with the gateway) and a prefill node. Every process computes with one
thread, so that two of them fit on two cores. In each arrangement long prompts go one after another to idle workers, which
gives TTFT; then some answers run, and long prompts come beside them: the time between two pieces of those answers before and
while a prompt is computed is its ITL. Prints both, the KV bytes of a prompt, the bandwidth that the transfer agent measured,
and the bar: TTFT at most that of the one worker + 1.3 x bytes / bandwidth + 5 ms. The texts must be the same. Nothing but the standard library.
"""

import argparse
import json
import pathlib
import re
import shutil
import signal
import statistics
import subprocess
import tempfile
import threading
import time
import urllib.request

from peer_pull import Stream, metric, prompt, start

SPLIT = r'starling_worker_sourced_total\{kind="split",outcome="complete"\}'
BYTES = r"starling_transfer_bytes_total"
RATE = r"starling_transfer_bytes_per_second"


class Timed(Stream):
    """A stream that notes when each piece came."""

    def follow(self):
        self.times = []
        for line in self.response:
            if line.startswith(b"data: {"):
                for choice in json.loads(line[6:]).get("choices", []):
                    if choice.get("text"):
                        self.times.append(time.perf_counter())
                        self.text += choice["text"]


def nodes(arguments, home, split):
    same = ["--workers", "1", "--threads", "1", "--log-level", "warn"]
    same += ["--model", arguments.model] if arguments.model else []
    up = [arguments.binary, "up", "--name", "box", "--http", "127.0.0.1:0", "--bind", "127.0.0.1:0", "--data-dir", str(home / "box")]
    found = [start(up + same + ["--worker-role", "decode" if split else "both"], home / "box")]
    if split:
        facts = json.dumps({key: value for key, value in found[0][1].items() if key != "http"})
        seed = re.search(r"127\.0\.0\.1:\d+", facts).group()
        join = [arguments.binary, "join", seed, "--name", "far", "--role", "worker", "--http", "127.0.0.1:0", "--worker-role", "prefill"]
        found.append(start(join + same + ["--data-dir", str(home / "far"), "--key-file", str(home / "box" / "cluster.key")], home / "far"))
    for _ in range(300):
        rows = subprocess.run([arguments.binary, "instances", "--data-dir", str(home / "box")], capture_output=True, text=True)
        if len(re.findall(r"worker.*alive +yes", rows.stdout)) >= len(found):
            return found
        time.sleep(0.1)
    raise SystemExit("the workers are not ready")


def gaps(streams, begin, end):
    return [b - a for stream in streams for a, b in zip(stream.times, stream.times[1:]) if begin <= a and b <= end]


def percentile(values, share):
    values = sorted(values)
    return values[min(len(values) - 1, int(len(values) * share))]


def measure(arguments, split):
    home = pathlib.Path(tempfile.mkdtemp(prefix="split-serving-"))
    found = nodes(arguments, home, split)
    name = "prefill and decode" if split else "one worker"
    try:
        address = found[0][1]["http"]
        model = json.loads(urllib.request.urlopen(f"http://{address}/v1/models", timeout=30).read())["data"][0]["id"]
        for seed in range(4):
            Stream(address, model, prompt(100, 50 + seed), 32).read()
        Stream(address, model, prompt(300, 60), 4).read()
        before = metric(found, BYTES), metric(found, SPLIT)
        quiet = [Stream(address, model, prompt(arguments.tokens, 100 + seed), 16).read() for seed in range(arguments.prompts)]
        came, splits = metric(found, BYTES) - before[0], metric(found, SPLIT) - before[1]
        rate = metric(found, RATE)
        streams = [Timed(address, model, prompt(60, 200 + seed), 1500) for seed in range(arguments.streams)]
        threads = [threading.Thread(target=stream.follow, daemon=True) for stream in streams]
        for thread in threads:
            thread.start()
        while any(len(getattr(stream, "times", [])) < 20 for stream in streams):
            time.sleep(0.01)
        begun = time.perf_counter()
        time.sleep(2)
        ended = time.perf_counter()
        alone = gaps(streams, begun, ended)
        beside, busy = [], []
        for seed in range(max(1, arguments.prompts // 2)):
            begun = time.perf_counter()
            busy.append(Stream(address, model, prompt(arguments.tokens, 300 + seed), 2).read())
            beside += gaps(streams, begun, time.perf_counter())
        still = all(thread.is_alive() for thread in threads)
        for stream in streams:
            stream.leave()
    finally:
        for node, _ in found:
            node.kill()
            node.wait()
        shutil.rmtree(home, ignore_errors=True)
    ttft = statistics.median(stream.first for stream in quiet)
    print(f"{name}: TTFT p50 {ttft:.0f} ms ({min(s.first for s in quiet):.0f} to {max(s.first for s in quiet):.0f}), beside {len(streams)} answers "
          f"{statistics.median(s.first for s in busy):.0f} ms; {splits:.0f} of {arguments.prompts} split", flush=True)
    for what, values in [("alone", alone), ("while prompts are computed", beside)]:
        print(f"  ITL of running answers {what}: mean {1e3 * statistics.mean(values):.1f}, p50 {1e3 * statistics.median(values):.1f}, "
              f"p99 {1e3 * percentile(values, 0.99):.1f}, longest {1e3 * max(values):.1f} ms ({len(values)} gaps)", flush=True)
    if not still:
        print("  the running answers ended too early: these are not ITL beside all prompts")
    return ttft, [stream.text for stream in quiet], (came / arguments.prompts, rate), (statistics.mean(alone), statistics.mean(beside))


def main():
    signal.signal(signal.SIGTERM, lambda *_: exit(1))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--binary", default="target/release/starling")
    parser.add_argument("--model")
    parser.add_argument("--tokens", type=int, default=1500)
    parser.add_argument("--prompts", type=int, default=5)
    parser.add_argument("--streams", type=int, default=2)
    arguments = parser.parse_args()
    local, texts, _, whole = measure(arguments, False)
    ttft, split_texts, (size, rate), parts = measure(arguments, True)
    same = sum(a == b for a, b in zip(texts, split_texts))
    moving = 1e3 * size / rate if rate else float("nan")
    print(f"{size / 2**20:.1f} MiB a prompt at {rate / 1e9:.2f} GB/s: {moving:.1f} ms; TTFT {ttft:.0f} ms, bar {local:.0f} + 1.3 x {moving:.1f} + 5 = "
          f"{local + 1.3 * moving + 5:.0f} ms; {same} of {len(texts)} texts the same; ITL {parts[1] / parts[0]:.2f} x while prompts are computed, "
          f"{whole[1] / whole[0]:.2f} x on the one worker")


if __name__ == "__main__":
    main()
