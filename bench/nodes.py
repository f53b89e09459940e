"""Real nodes for the measurements beside this file: started, asked, counted, ended. Nothing but the standard library."""

import http.client
import json
import pathlib
import random
import re
import shutil
import signal
import subprocess
import tempfile
import time
import urllib.request

WORDS = ("river stone cloud amber field north quiet light copper valley summer branch harbour silver meadow night wind "
         "garden bridge coast forest island morning path shadow spring").split()
ANY = "127.0.0.1:0"


def prompt(tokens, seed):
    """About `tokens` tokens: a common word with its space is one."""
    chance = random.Random(seed)
    return " ".join(chance.choice(WORDS) for _ in range(tokens))


def start(command, folder):
    """A process and what it wrote of itself, once it is ready."""
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


def stop(node):
    """Ends a process in order."""
    node.send_signal(signal.SIGTERM)
    node.wait(timeout=60)


def metric(nodes, pattern):
    """The sum of all series of these nodes whose line begins like the pattern."""
    total = 0.0
    for _, facts in nodes:
        text = urllib.request.urlopen(f"http://{facts['http']}/metrics", timeout=10).read().decode()
        total += sum(float(line.split()[-1]) for line in text.splitlines() if re.match(pattern, line))
    return total


def settled(nodes, pattern, wanted):
    """Waits until a sum is what it should be."""
    for _ in range(300):
        if metric(nodes, pattern) == wanted:
            return
        time.sleep(0.05)
    raise SystemExit(f"never: {pattern} {wanted}")


class Cluster:
    """Some nodes in a folder of their own; each is (process, what it wrote of itself). The first one is asked."""

    def __init__(self, binary, prefix):
        self.binary, self.home, self.nodes, self.first, self.key = binary, pathlib.Path(tempfile.mkdtemp(prefix=f"{prefix}-")), [], None, None

    def add(self, name, *options, alone=False):
        """Starts a node: the first one, or one that is `alone`, begins a cluster; others join the first one's."""
        if alone or not self.nodes:
            command = [self.binary, "up", "--bind", ANY]
            self.first = self.first or name
        else:
            # The addresses of a node are those of its mesh and of its gateway.
            facts = json.dumps({key: value for key, value in self.nodes[0][1].items() if key != "http"})
            seed = re.search(r"127\.0\.0\.1:\d+", facts).group()
            command = [self.binary, "join", seed, "--key-file", str(self.home / self.first / "cluster.key")]
        command += ["--name", name, "--http", ANY, "--data-dir", str(self.home / name), "--log-level", "warn", *options]
        self.nodes.append(start(command, self.home / name))
        return self.nodes[-1]

    @property
    def http(self):
        return self.nodes[0][1]["http"]

    def verb(self, *words):
        """Runs a verb at the first node; what it printed."""
        done = subprocess.run([self.binary, *words, "--data-dir", str(self.home / self.first)], capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{' '.join(words)}: {done.stdout}{done.stderr}")
        return done.stdout

    def ready(self, workers):
        """Waits until requests may go to so many workers, and asks for their model."""
        for _ in range(600):
            if len(re.findall(r"worker.*alive +yes", self.verb("instances"))) >= workers:
                break
            time.sleep(0.1)
        else:
            raise SystemExit("the workers are not ready")
        headers = {"authorization": f"Bearer {self.key}"} if self.key else {}
        asked = urllib.request.Request(f"http://{self.http}/v1/models", headers=headers)
        self.model = json.loads(urllib.request.urlopen(asked, timeout=30).read())["data"][0]["id"]
        return self

    def stream(self, text, tokens, **more):
        return Stream(self.http, self.model, text, tokens, key=self.key, **more)

    def count(self, pattern):
        return metric(self.nodes, pattern)

    def end(self):
        for node, _ in self.nodes:
            node.kill()
            node.wait()
        shutil.rmtree(self.home, ignore_errors=True)


class Stream:
    """One streamed completion; `first` is the time to its first text, ms, `usage` what its end said of tokens."""

    def __init__(self, address, model, text, tokens, salt=None, worker=None, key=None):
        body = {"model": model, "prompt": text, "max_tokens": tokens, "temperature": 0, "stream": True, "ignore_eos": True,
                "stream_options": {"include_usage": True}}
        if salt:
            body["cache_salt"] = salt
        self.connection = http.client.HTTPConnection(address, timeout=300)
        self.text, self.first, self.usage, self.begun = "", None, {}, time.perf_counter()
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
            event = json.loads(line[6:])
            self.usage = event.get("usage") or self.usage
            for choice in event.get("choices", []):
                if choice.get("text"):
                    self.first = self.first or (time.perf_counter() - self.begun) * 1e3
                    self.text += choice["text"]
            if until_first and self.first:
                break
        return self

    def follow(self):
        """Reads on, or until it is left, and notes when each piece came."""
        self.times = []
        try:
            for line in self.response:
                if line.startswith(b"data: {"):
                    now = time.perf_counter()
                    for choice in json.loads(line[6:]).get("choices", []):
                        if choice.get("text"):
                            self.times.append(now)
                            self.text += choice["text"]
        except (OSError, ValueError, AttributeError, http.client.HTTPException):
            pass  # It was left.

    def leave(self):
        self.connection.sock.close() if self.connection.sock else None
        self.response.close()
