"""The same answers however they are served: whole, split, moved, from a disk tier, with a peer's blocks. Greedy, real model, real processes.

  python3 bench/same_text.py [--binary target/release/starling] [--model FILE] [--engine simulated] [--prompts 200] [--answer 16] [--only split,moved]

Each prompt (about 272 to 288 tokens) is answered by one worker first (one process). Then: by a prefill and a decode node (two processes);
by two worker nodes that change roles while the answers run, eight at a time, so that every running one moves (three processes,
answers of 48 tokens at least; the shorter ones of the other ways are the beginnings of the whole ones); by a node that was ended in order and started again
with its disk tier (one process); by a node that pulls the prompt's blocks from another one (two processes). Prints for each how
many texts are the same, how many requests really went that way, and how many tokens were computed a second time. Exits with 1
when a text differs, a request did not go its way, or a token was computed again. Nothing but the standard library.
"""

import argparse
import json
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request

from peer_pull import Stream, metric, prompt, settled, start

MOVED = r'starling_gateway_moved_total\{outcome="moved"\}'
RECOMPUTED = r"starling_worker_tokens_recomputed_total"
RUNNING = r"starling_worker_sequences_running"
FETCHED = r"starling_kv_tier_fetched_blocks_total"
AT_ONCE = 8


def sourced(kind):
    return rf'starling_worker_sourced_total\{{kind="{kind}",outcome="complete"\}}'


class Cluster:
    """Some nodes, one worker each; the first one has the gateway."""

    def __init__(self, arguments):
        self.arguments, self.home, self.nodes = arguments, pathlib.Path(tempfile.mkdtemp(prefix="same-text-")), []
        self.key = None

    def add(self, name, *options, front=False):
        folder = self.home / name
        command = [self.arguments.binary, "up"]
        if self.nodes:
            facts = json.dumps({key: value for key, value in self.nodes[0][1].items() if key != "http"})
            seed = re.search(r"127\.0\.0\.1:\d+", facts).group()
            command = [self.arguments.binary, "join", seed, "--key-file", str(self.home / self.first / "cluster.key")]
        else:
            self.first = name
            command += ["--bind", "127.0.0.1:0"]
        command += ["--name", name, "--http", "127.0.0.1:0", "--data-dir", str(folder), "--log-level", "warn", *options]
        if not front:
            command += ["--workers", "1", "--kv-mib", "256", "--threads", "1"]
            # The simulated engine's words depend on the bytes of its KV memory; small steps make a prompt worth moving.
            slow = ["--engine", "simulated", "--batch-tokens-max", "64"]
            command += slow if self.arguments.engine == "simulated" else []
            command += ["--model", self.arguments.model] if self.arguments.model else []
        self.nodes.append(start(command, folder))
        if len(self.nodes) == 1:
            self.http = self.nodes[0][1]["http"]

    def verb(self, *words):
        done = subprocess.run([self.arguments.binary, *words, "--data-dir", str(self.home / self.first)], capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{' '.join(words)}: {done.stdout}{done.stderr}")
        return done.stdout

    def ready(self, workers):
        for _ in range(600):
            if len(re.findall(r"worker.*alive +yes", self.verb("instances"))) >= workers:
                break
            time.sleep(0.1)
        self.model = json.loads(urllib.request.urlopen(self.get("/v1/models"), timeout=30).read())["data"][0]["id"]
        return self

    def get(self, path):
        headers = {"authorization": f"Bearer {self.key}"} if self.key else {}
        return urllib.request.Request(f"http://{self.http}{path}", headers=headers)

    def ask(self, text, tokens, **more):
        return Stream(self.http, self.model, text, tokens, key=self.key, **more).read().text

    def count(self, pattern):
        return metric(self.nodes, pattern)

    def end(self):
        for node, _ in self.nodes:
            node.kill()
            node.wait()
        shutil.rmtree(self.home, ignore_errors=True)


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
            streams = [Stream(cluster.http, cluster.model, text, max(48, arguments.answer)) for text in prompts[first:first + AT_ONCE]]
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
        node, _ = cluster.nodes.pop()
        node.send_signal(signal.SIGTERM)
        node.wait(timeout=120)
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


WAYS = {"split": split, "moved": moved, "restored": restored, "pulled": pulled}


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
