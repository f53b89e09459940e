"""The same answers however they are served: whole, split, moved, from a disk tier, with a peer's blocks. Greedy, real model, real processes.

  python3 bench/same_text.py [--binary target/release/starling] [--model FILE] [--engine simulated] [--prompts 200] [--answer 16] [--only split,moved]

Each prompt (about 272 to 288 tokens) is answered by one worker first (one process). Then: by a prefill and a decode node (two processes);
by two worker nodes that change roles while the answers run, eight at a time, so that every running one moves (three processes,
answers of 48 tokens at least; the shorter ones of the other ways are the beginnings of the whole ones); by a node that was ended in order and started again
with its disk tier (one process); by a node that pulls the prompt's blocks from another one, from its device or from its host's
memory (two processes each). Prints for each how
many texts are the same, how many requests really went that way, and how many tokens were computed a second time. Exits with 1
when a text differs, a request did not go its way, or a token was computed again. Nothing but the standard library.
"""

import argparse
import sys
import threading
import time

import nodes
from nodes import prompt, settled, stop

MOVED = r'starling_gateway_moved_total\{outcome="moved"\}'
RECOMPUTED = r"starling_worker_tokens_recomputed_total"
RUNNING = r"starling_worker_sequences_running"
RAISED = r"starling_transfer_raised_blocks_total\{outcome=\"host\"\}"
FETCHED = r"starling_kv_tier_fetched_blocks_total"
AT_ONCE = 8


def sourced(kind):
    return rf'starling_worker_sourced_total\{{kind="{kind}",outcome="complete"\}}'


class Cluster(nodes.Cluster):
    """Some nodes, one worker each; the first one has the gateway."""

    def __init__(self, arguments):
        super().__init__(arguments.binary, "same-text")
        self.arguments = arguments

    def add(self, name, *options, front=False, kv_mib=256):
        if not front:
            options += ("--workers", "1", "--kv-mib", str(kv_mib), "--threads", "1")
            # The simulated engine's words depend on the bytes of its KV memory; small steps make a prompt worth moving.
            options += ("--engine", "simulated", "--batch-tokens-max", "64") if self.arguments.engine == "simulated" else ()
            options += ("--model", self.arguments.model) if self.arguments.model else ()
        super().add(name, *options)

    def ask(self, text, tokens, **more):
        return self.stream(text, tokens, **more).read().text


def whole(arguments, prompts):
    cluster = Cluster(arguments)
    cluster.add("box")
    cluster.ready(1)
    try:
        return [cluster.ask(text, max(48, arguments.answer)) for text in prompts]
    finally:
        cluster.end()


def split(arguments, prompts):
    cluster = Cluster(arguments)
    cluster.add("box", "--worker-role", "decode")
    cluster.add("far", "--role", "worker", "--worker-role", "prefill")
    cluster.ready(2)
    try:
        return [cluster.ask(text, arguments.answer) for text in prompts], cluster.count(sourced("split")), cluster.count(RECOMPUTED)
    finally:
        cluster.end()


def moved(arguments, prompts):
    cluster = Cluster(arguments)
    cluster.add("front", "--role", "router,gateway", front=True)
    cluster.add("one", "--role", "worker")
    cluster.add("two", "--role", "worker")
    cluster.ready(2)
    texts, (source, target) = [], ("one", "two")
    try:
        for first in range(0, len(prompts), AT_ONCE):
            # A worker that computes prompts takes no whole request while another one answers.
            cluster.verb("role", f"{source}/0", "both")
            cluster.verb("role", f"{target}/0", "prefill")
            time.sleep(1)
            streams = [cluster.stream(text, max(48, arguments.answer)) for text in prompts[first:first + AT_ONCE]]
            for stream in streams:
                stream.read(until_first=True)
            cluster.verb("role", f"{target}/0", "both")
            cluster.verb("role", f"{source}/0", "prefill")
            threads = [threading.Thread(target=stream.read) for stream in streams]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            texts += [stream.text for stream in streams]
            settled(cluster.nodes, RUNNING, 0)
            source, target = target, source
        return texts, cluster.count(MOVED), cluster.count(RECOMPUTED)
    finally:
        cluster.end()


def restored(arguments, prompts):
    cluster = Cluster(arguments)
    disk = ["--kv-disk", str(cluster.home / "kv"), "--kv-disk-size", "8GiB"]
    cluster.add("box", *disk)
    cluster.ready(1)
    try:
        for text in prompts:
            cluster.ask(text, 1)
        stop(cluster.nodes.pop()[0])
        cluster.add("box", *disk)
        cluster.ready(1)
        texts, ways = [], 0
        for text in prompts:
            before = cluster.count(FETCHED)
            texts.append(cluster.ask(text, arguments.answer))
            ways += cluster.count(FETCHED) > before
        return texts, ways, cluster.count(RECOMPUTED)
    finally:
        cluster.end()


def pulled(arguments, prompts):
    cluster = Cluster(arguments)
    cluster.key, keys = "key-of-this-bench", cluster.home / "keys"
    keys.write_text(f"{cluster.key} scopes=pin\n")
    cluster.add("box", "--api-keys-file", str(keys))
    cluster.add("far", "--role", "worker")
    cluster.ready(2)
    # A worker tells how fast it is after its first steps; before that nobody knows what a pull saves.
    cluster.ask(prompt(40, 1), 64, worker="box/0")
    cluster.ask(prompt(40, 2), 64, worker="far/0")
    texts = []
    try:
        for text in prompts:
            cluster.ask(text, 1, worker="box/0")
            # The index hears of blocks within a moment of their computation.
            time.sleep(0.3)
            texts.append(cluster.ask(text, arguments.answer, worker="far/0"))
        return texts, cluster.count(sourced("pull")), cluster.count(RECOMPUTED)
    finally:
        cluster.end()


def lent(arguments, prompts):
    """As `pulled`, when the peer's device has none of it any more: it has room for a tenth of the prompts, its host's memory for all."""
    cluster = Cluster(arguments)
    cluster.key, keys = "key-of-this-bench", cluster.home / "keys"
    keys.write_text(f"{cluster.key} scopes=pin\n")
    others = [prompt(280, 9_000 + number) for number in range(20)]
    cluster.add("box", "--api-keys-file", str(keys), "--kv-host", "4GiB", kv_mib=64)
    cluster.add("far", "--role", "worker")
    cluster.ready(2)
    cluster.ask(prompt(40, 1), 64, worker="box/0")
    cluster.ask(prompt(40, 2), 64, worker="far/0")
    try:
        for text in prompts + others:
            cluster.ask(text, 1, worker="box/0")
        time.sleep(0.5)
        texts, ways = [], 0
        for text in prompts:
            before = cluster.count(RAISED)
            texts.append(cluster.ask(text, arguments.answer, worker="far/0"))
            ways += cluster.count(RAISED) - before >= 15
        return texts, ways, cluster.count(RECOMPUTED)
    finally:
        cluster.end()


WAYS = {"split": split, "moved": moved, "restored": restored, "pulled": pulled, "lent": lent}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--binary", default="target/release/starling")
    parser.add_argument("--model")
    parser.add_argument("--engine", default="embedded")
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--answer", type=int, default=16)
    parser.add_argument("--only", default=",".join(WAYS))
    arguments = parser.parse_args()
    prompts = [prompt(272 + number * 37 % 16, 5_000 + number) for number in range(arguments.prompts)]
    begun = time.time()
    right = whole(arguments, prompts)
    print(f"whole: {len(right)} prompts, {time.time() - begun:.0f} s", flush=True)
    good = True
    for name in arguments.only.split(","):
        begun = time.time()
        texts, went, again = WAYS[name](arguments, prompts)
        same = sum(a == b if name == "moved" else bool(a) and b.startswith(a) for a, b in zip(texts, right))
        good &= same == went == len(prompts) and again == 0
        print(f"{name}: {same} of {len(prompts)} texts the same, {went:.0f} went this way, {again:.0f} tokens computed again, "
              f"{time.time() - begun:.0f} s", flush=True)
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
