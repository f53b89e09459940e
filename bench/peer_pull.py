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
import http.client
import json
import pathlib
import random
import re
import shutil
import statistics
import subprocess
import tempfile
import threading
import time
import urllib.request

WORDS = ("river stone cloud amber field north quiet light copper valley summer branch harbour silver meadow night wind "
         "garden bridge coast forest island morning path shadow spring").split()
PULLED = r'starling_worker_sourced_total\{kind="pull",outcome="complete"\}'


def prompt(tokens, seed):
    """About `tokens` tokens: a common word with its space is one."""
    chance = random.Random(seed)
    return " ".join(chance.choice(WORDS) for _ in range(tokens))


def start(command, folder):
    node = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    for _ in range(600):
        try:
            facts = json.loads((folder / "node.json").read_text())
            if facts.get("http") and facts.get("pid") == node.pid:
                return node, facts
        except (OSError, ValueError):
            pass
        if node.poll() is not None:
            raise SystemExit(f"the node ended with {node.returncode}")
        time.sleep(0.1)
    raise SystemExit("the node is not ready")


def cluster(arguments, home):
    model = ["--model", arguments.model] if arguments.model else []
    same = ["--workers", "1", "--sequences-max", "1", "--kv-mib", "256", "--threads", str(arguments.threads), "--log-level", "warn"] + model
    box = home / "box"
    up = [arguments.binary, "up", "--name", "box", "--http", "127.0.0.1:0", "--bind", "127.0.0.1:0", "--data-dir", str(box)]
    nodes = [start(up + same, box)]
    seed = re.search(r"127\.0\.0\.1:\d+", json.dumps({key: value for key, value in nodes[0][1].items() if key != "http"}))
    far = home / "far"
    join = [arguments.binary, "join", seed.group(), "--name", "far", "--role", "worker,gateway", "--http", "127.0.0.1:0",
            "--data-dir", str(far), "--key-file", str(box / "cluster.key")]
    nodes.append(start(join + same, far))
    return nodes


class Stream:
    """One streamed completion; `first` is the time to its first text, ms."""

    def __init__(self, address, model, text, tokens, salt=None, worker=None, key=None):
        body = {"model": model, "prompt": text, "max_tokens": tokens, "temperature": 0, "stream": True, "ignore_eos": True}
        if salt:
            body["cache_salt"] = salt
        self.connection = http.client.HTTPConnection(address, timeout=300)
        self.text, self.first, self.begun = "", None, time.perf_counter()
        headers = {"content-type": "application/json"} | ({"x-starling-worker": worker} if worker else {})
        headers |= {"authorization": f"Bearer {key}"} if key else {}
        self.connection.request("POST", "/v1/completions", json.dumps(body), headers)
        self.response = self.connection.getresponse()
        if self.response.status != 200:
            raise SystemExit(f"{self.response.status}: {self.response.read()[:300]}")

    def read(self, until_first=False):
        for line in self.response:
            if not line.startswith(b"data: {"):
                continue
            for choice in json.loads(line[6:]).get("choices", []):
                if choice.get("text"):
                    self.first = self.first or (time.perf_counter() - self.begun) * 1e3
                    self.text += choice["text"]
            if until_first and self.first:
                break
        return self

    def leave(self):
        self.connection.sock.close() if self.connection.sock else None
        self.response.close()


def metric(nodes, pattern):
    total = 0.0
    for _, facts in nodes:
        text = urllib.request.urlopen(f"http://{facts['http']}/metrics", timeout=10).read().decode()
        total += sum(float(line.split()[-1]) for line in text.splitlines() if re.match(pattern, line))
    return total


def settled(nodes, pattern, wanted):
    for _ in range(300):
        if metric(nodes, pattern) == wanted:
            return
        time.sleep(0.05)
    raise SystemExit(f"never: {pattern} {wanted}")


def round_of(nodes, model, tokens, number):
    address = nodes[0][1]["http"]
    running = r"starling_worker_sequences_running"
    shared = prompt(tokens, 1_000 + number)
    Stream(address, model, shared, 1).read()
    # The index hears of blocks within a moment of their computation.
    time.sleep(0.5)
    busy = Stream(address, model, shared + " once", 500).read(until_first=True)
    reader = threading.Thread(target=lambda: drain(busy), daemon=True)
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


def drain(stream):
    try:
        stream.read()
    except (OSError, ValueError, AttributeError, http.client.HTTPException):
        pass


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--binary", default="target/release/starling")
    parser.add_argument("--model")
    parser.add_argument("--tokens", type=int, default=1500)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1, help="of each node; more than the cores together make every step slow")
    arguments = parser.parse_args()
    home = pathlib.Path(tempfile.mkdtemp(prefix="peer-pull-"))
    nodes = cluster(arguments, home)
    try:
        address = nodes[0][1]["http"]
        for _ in range(300):
            rows = subprocess.run([arguments.binary, "instances", "--data-dir", str(home / "box")], capture_output=True, text=True)
            if len(re.findall(r"worker.*alive +yes", rows.stdout)) >= 2:
                break
            time.sleep(0.1)
        model = json.loads(urllib.request.urlopen(f"http://{address}/v1/models", timeout=30).read())["data"][0]["id"]
        for seed in range(6):
            Stream(address, model, prompt(300, seed), 8).read()
        rounds = [round_of(nodes, model, arguments.tokens, number) for number in range(arguments.rounds)]
    finally:
        for node, _ in nodes:
            node.kill()
            node.wait()
        shutil.rmtree(home, ignore_errors=True)
    computed, pulled = (statistics.median(times) for times in zip(*rounds))
    print(f"medians: computed {computed:.0f} ms, pulled {pulled:.0f} ms: {pulled / computed:.3f} (bar 0.4)")


if __name__ == "__main__":
    main()
