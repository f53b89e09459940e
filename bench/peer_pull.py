"""What a peer's cached blocks save: time to the first token of a long prompt, computed and pulled from another node.

  python3 bench/peer_pull.py [--binary target/release/starling] [--model FILE] [--tokens 1500] [--rounds 5]

Two nodes with one worker of one place each. Each round: a prompt is computed by one of them; a second request with the same
beginning runs there for long, so that its only place is taken; the same beginning again goes to the other worker, which pulls
its blocks; then a new prompt of the same length goes there too, which computes it. Both timed ones run beside the same long
answer, and both begin with a prompt that worker has not seen. The answer after the pull must be the text that the same
prompt has when all of it is computed. Prints a line a round and the medians with their ratio (bar: 0.4).
Nothing but the standard library.
"""

import argparse
import statistics
import threading
import time

from nodes import Cluster, Stream, metric, prompt, settled

PULLED = r'starling_worker_sourced_total\{kind="pull",outcome="complete"\}'


def round_of(nodes, model, tokens, number):
    address = nodes[0][1]["http"]
    running = r"starling_worker_sequences_running"
    shared = prompt(tokens, 1_000 + number)
    Stream(address, model, shared, 1).read()
    # The index hears of blocks within a moment of their computation.
    time.sleep(0.5)
    busy = Stream(address, model, shared + " once", 500).read(until_first=True)
    reader = threading.Thread(target=busy.follow, daemon=True)
    reader.start()
    before = metric(nodes, PULLED)
    pulled = Stream(address, model, shared + " twice", 16).read()
    came = metric(nodes, PULLED) - before
    computed = Stream(address, model, prompt(tokens, 2_000 + number), 16).read()
    busy_still = reader.is_alive()
    busy.leave()
    settled(nodes, running, 0)
    whole = Stream(address, model, shared + " twice", 16, salt=f"alone-{number}").read()
    settled(nodes, running, 0)
    print(f"round {number + 1}: computed {computed.first:.0f} ms, pulled {pulled.first:.0f} ms, {came:.0f} pull, texts "
          f"{'equal' if whole.text == pulled.text else 'DIFFER'}{'' if busy_still else ', the long answer had ended'}", flush=True)
    if whole.text != pulled.text or came != 1 or not busy_still:
        raise SystemExit("this round does not count")
    return computed.first, pulled.first


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--binary", default="target/release/starling")
    parser.add_argument("--model")
    parser.add_argument("--tokens", type=int, default=1500)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1, help="of each node; more than the cores together make every step slow")
    arguments = parser.parse_args()
    same = ["--workers", "1", "--sequences-max", "1", "--kv-mib", "256", "--threads", str(arguments.threads)]
    same += ["--model", arguments.model] if arguments.model else []
    cluster = Cluster(arguments.binary, "peer-pull")
    try:
        cluster.add("box", *same)
        cluster.add("far", "--role", "worker,gateway", *same)
        cluster.ready(2)
        for seed in range(6):
            cluster.stream(prompt(300, seed), 8).read()
        rounds = [round_of(cluster.nodes, cluster.model, arguments.tokens, number) for number in range(arguments.rounds)]
    finally:
        cluster.end()
    computed, pulled = (statistics.median(times) for times in zip(*rounds))
    print(f"medians: computed {computed:.0f} ms, pulled {pulled:.0f} ms: {pulled / computed:.3f} (bar 0.4)")


if __name__ == "__main__":
    main()
