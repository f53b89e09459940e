"""Live migration: running streams of one worker node go on at another one, with the real model and real processes.

  python3 bench/migrate.py [--binary target/release/starling] [--model FILE] [--streams 8] [--tokens 700] [--rounds 3]

A front node (gateway and router) and two worker nodes. Each round: the second worker only computes prompts, so that the streams
answer at the first one; then the two change roles while every stream is in the middle of its answer, and all of them go on at
the second, as they do when the first is drained. The next round goes back. Every text must be that of the same prompt undisturbed, and no
token may be computed twice. A pause is the time in which a stream is in no worker's batch, as the workers measure it: from the
end of its last step at the one to the beginning of its first at the other. Prints a line a round: the mean pause, the gap of
each stream at its client (the longest between two of its pieces within two seconds of the change: the pause and one step), the
usual gap before it, the time until the first worker has nothing left; then the percentiles over all streams. Bars: pause p99
60 ms, total 2 s. Nothing but the standard library.
"""

import argparse
import re
import statistics
import threading
import time
import urllib.request

from nodes import Cluster, metric, prompt

MOVED = r'starling_gateway_moved_total\{outcome="moved"\}'
RECOMPUTED = r"starling_worker_tokens_recomputed_total"


def paused(nodes):
    """(moves, seconds in all, {bucket: moves at most that long}) of every worker."""
    name, buckets = "starling_worker_move_pause_seconds", {}
    for _, facts in nodes:
        text = urllib.request.urlopen(f"http://{facts['http']}/metrics", timeout=10).read().decode()
        for line in text.splitlines():
            found = re.match(name + r'_bucket\{.*le="([^"]+)"\} (\S+)', line)
            if found:
                bucket = float(found.group(1).replace("+Inf", "inf"))
                buckets[bucket] = buckets.get(bucket, 0) + float(found.group(2))
    return metric(nodes, name + "_count"), metric(nodes, name + "_sum"), buckets


def role(cluster, name, role):
    """Steers new requests: a worker that only computes prompts takes none while another one answers."""
    cluster.verb("role", f"{name}/0", role)
    # The router looks at the directory a few times a second.
    time.sleep(1)


def run(cluster, texts, arguments, salt):
    streams = [cluster.stream(text, arguments.tokens, salt=salt) for text in texts]
    threads = [threading.Thread(target=stream.follow) for stream in streams]
    for thread in threads:
        thread.start()
    return streams, threads


def round_of(cluster, texts, whole, arguments, number):
    source, target = ("one", "two") if number % 2 == 0 else ("two", "one")
    role(cluster, source, "both")
    role(cluster, target, "prefill")
    before = metric(cluster.nodes, MOVED), metric(cluster.nodes, RECOMPUTED)
    count, seconds, _ = paused(cluster.nodes)
    streams, threads = run(cluster, texts, arguments, f"round-{number}")
    while any(len(getattr(stream, "times", [])) < arguments.tokens // 4 for stream in streams):
        time.sleep(0.01)
    running = metric(cluster.nodes[1 + number % 2:2 + number % 2], "starling_worker_sequences_running")
    role(cluster, target, "both")
    begun = time.perf_counter()
    cluster.verb("role", f"{source}/0", "prefill")
    while metric(cluster.nodes[1 + number % 2:2 + number % 2], "starling_worker_sequences_running") > 0:
        time.sleep(0.02)
    total = time.perf_counter() - begun
    for thread in threads:
        thread.join()
    pauses, usual = [], []
    for stream in streams:
        gaps = list(zip(stream.times, (b - a for a, b in zip(stream.times, stream.times[1:]))))
        usual.append(statistics.median(gap for at, gap in gaps if at < begun))
        pauses.append(max(gap for at, gap in gaps if begun - 0.05 <= at <= begun + max(total, 2)))
    moved = metric(cluster.nodes, MOVED) - before[0]
    recomputed = metric(cluster.nodes, RECOMPUTED) - before[1]
    same = sum(stream.text == text for stream, text in zip(streams, whole))
    after = paused(cluster.nodes)
    mean = 1e3 * (after[1] - seconds) / max(1, after[0] - count)
    shown = " ".join(f"{1e3 * pause:.0f}" for pause in sorted(pauses))
    print(f"round {number + 1}, {source} to {target}: {moved:.0f} of {running:.0f} moved, {same} of {len(texts)} texts the same, {recomputed:.0f} tokens "
          f"recomputed; mean pause {mean:.1f} ms; longest gaps {shown} ms, usual gap {1e3 * statistics.median(usual):.0f} ms; empty after {total:.2f} s", flush=True)
    if same != len(texts) or moved != running or recomputed:
        raise SystemExit("this round is not as it should be")
    return pauses, total


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--binary", default="target/release/starling")
    parser.add_argument("--model")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=700)
    parser.add_argument("--prompt", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1, help="of each worker; more than the cores together make every step slow")
    arguments = parser.parse_args()
    cluster = Cluster(arguments.binary, "migrate")
    same = ["--role", "worker", "--workers", "1", "--threads", str(arguments.threads)] + (["--model", arguments.model] if arguments.model else [])
    try:
        cluster.add("front", "--role", "router,gateway")
        for name in ("one", "two"):
            cluster.add(name, *same)
        cluster.ready(2)
        texts = [prompt(arguments.prompt, seed) for seed in range(arguments.streams)]
        streams, threads = run(cluster, texts, arguments, "whole")
        for thread in threads:
            thread.join()
        whole = [stream.text for stream in streams]
        rounds = [round_of(cluster, texts, whole, arguments, number) for number in range(arguments.rounds)]
        count, seconds, buckets = paused(cluster.nodes)
    finally:
        cluster.end()
    bound = [min(bucket for bucket, moves in buckets.items() if moves >= count * share) for share in (0.5, 0.99)]
    print(f"pauses of {count:.0f} moves: mean {1e3 * seconds / count:.1f} ms, p50 at most {1e3 * bound[0]:.0f} ms, p99 at most {1e3 * bound[1]:.0f} ms (bar 60)")
    pauses = sorted(pause for of_round, _ in rounds for pause in of_round)
    worst = pauses[min(len(pauses) - 1, int(len(pauses) * 0.99))]
    print(f"longest gaps of {len(pauses)} streams at their clients: p50 {1e3 * statistics.median(pauses):.0f} ms, p99 {1e3 * worst:.0f} ms; "
          f"empty at most after {max(total for _, total in rounds):.2f} s (bar 2)")


if __name__ == "__main__":
    main()
