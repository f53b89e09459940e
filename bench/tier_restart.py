"""What a disk tier saves after a restart: time to the first token of a long prompt, computed and read back from disk.

  python3 bench/tier_restart.py [--binary target/release/starling] [--model FILE] [--tokens 1500] [--rounds 3]

Each round starts a node with one worker and an empty disk tier, times the prompt (computed), ends the node in order, starts
it again and times the same prompt (from disk). Both answers must be the same text. Two short requests go before each timed
one, so that neither pays for the first use of anything. Prints a line a round and the medians with their ratio (bar: 0.4).
Nothing but the standard library.
"""

import argparse
import statistics

from nodes import Cluster, prompt, stop

def started(arguments, cluster):
    more = ["--model", arguments.model] if arguments.model else []
    cluster.add("tier-bench", "--workers", "1", "--kv-mib", "128", "--kv-disk", str(cluster.home / "kv"), "--kv-disk-size", "4GiB", *more)
    return cluster.ready(1)


def timed(cluster, text, tokens):
    for seed in (1, 2):
        cluster.stream(prompt(20, seed), 4).read()
    return cluster.stream(text, tokens).read()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--binary", default="target/release/starling")
    parser.add_argument("--model")
    parser.add_argument("--tokens", type=int, default=1500)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    computed, restored = [], []
    for number in range(arguments.rounds):
        cluster = Cluster(arguments.binary, "tier-bench")
        try:
            text = prompt(arguments.tokens, 100 + number)
            cold = timed(started(arguments, cluster), text, 16)
            stop(cluster.nodes.pop()[0])
            kept = sum(file.stat().st_size for file in (cluster.home / "kv").rglob("blocks"))
            warm = timed(started(arguments, cluster), text, 16)
            stop(cluster.nodes.pop()[0])
        finally:
            cluster.end()
        same = cold.text == warm.text
        cached = (warm.usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        print(f"round {number + 1}: {cold.usage.get('prompt_tokens')} tokens, computed {cold.first:.0f} ms, after the restart "
              f"{warm.first:.0f} ms with {cached} tokens from disk ({kept / 2**20:.0f} MiB kept), texts "
              f"{'equal' if same else 'DIFFER'}", flush=True)
        if not same:
            raise SystemExit("the texts differ")
        computed.append(cold.first)
        restored.append(warm.first)
    cold, warm = statistics.median(computed), statistics.median(restored)
    print(f"medians: computed {cold:.0f} ms, restored {warm:.0f} ms: {warm / cold:.3f} (bar 0.4)")


if __name__ == "__main__":
    main()
