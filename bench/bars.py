"""What a running cluster does when it is measured, starved, killed and frozen: one line a figure.

  python3 bench/bars.py [--binary target/release/starling] [--model FILE] [--freeze 30] [--requests 2000]

Needs the release binary and the model (`make up` brings both) and nothing but the standard library. Starts its own
nodes on free ports with data folders in a temporary directory, and ends them.
"""

import argparse
import contextlib
import http.client
import json
import os
import pathlib
import re
import signal
import socket
import statistics
import subprocess
import tempfile
import threading
import time

HERE = pathlib.Path(__file__).resolve().parent.parent
DEFAULT_MODEL = pathlib.Path.home() / ".cache/starling/models/SmolLM2-135M-Instruct.Q4_1.gguf"
REST = [
    "gateway_requests_in_flight", "gateway_permits_in_use", "router_reservations", "streams_open",
    "stream_credit_bytes_outstanding", "worker_sequences_running", "worker_sequences_waiting",
    "worker_kv_blocks_pinned",
]


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Node:
    """A process of the binary; `ready_s` is the time from its start to its `ready` line."""

    def __init__(self, args, verb, folder, *flags):
        self.folder, self.http = folder, free_port()
        command = [args.binary, *verb, "--data-dir", str(folder), "--http", f"127.0.0.1:{self.http}", *flags]
        begun = time.perf_counter()
        self.log = open(f"{folder}.log", "ab")
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=self.log, text=True)
        for line in self.process.stdout:
            if line.startswith("ready "):
                break
        else:
            raise SystemExit(f"no ready line; see {folder}.log")
        self.ready_s = time.perf_counter() - begun
        self.address = re.search(r"node=(\S+)", line).group(1)

    def get(self, path):
        connection = http.client.HTTPConnection("127.0.0.1", self.http, timeout=60)
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()

    def rss_mib(self):
        status = pathlib.Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.search(r"VmRSS:\s+(\d+)", status).group(1)) / 1024

    def end(self):
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(20)
            if self.process.poll() is None:
                self.process.kill()


def complete(node, prompt, tokens=32, stream=False, **more):
    """One completion. Streaming returns (text, seconds to first token, error); unary (text, usage, error)."""
    body = {"model": "SmolLM2-135M-Instruct", "prompt": prompt, "max_tokens": tokens, "temperature": 0,
            "stream": stream, **more}
    connection = http.client.HTTPConnection("127.0.0.1", node.http, timeout=120)
    begun = time.perf_counter()
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    answer = connection.getresponse()
    if not stream:
        value = json.loads(answer.read())
        if "error" in value:
            return None, None, value["error"]
        return value["choices"][0]["text"], value["usage"], None
    text, first = "", None
    for line in answer:
        if not line.startswith(b"data: ") or line == b"data: [DONE]\n":
            continue
        value = json.loads(line[6:])
        if "error" in value:
            return text, first, value["error"]
        if value.get("choices") and value["choices"][0].get("text"):
            first = first or time.perf_counter() - begun
            text += value["choices"][0]["text"]
    return text, first, None


def wait(what, limit, until):
    begun = time.perf_counter()
    while time.perf_counter() - begun < limit:
        with contextlib.suppress(OSError, http.client.HTTPException):
            if until():
                return time.perf_counter() - begun
        threading.Event().wait(0.02)
    return float("nan")


def instances(args, node):
    listed = subprocess.run([args.binary, "instances", "--json", "--data-dir", str(node.folder)],
                            capture_output=True, text=True, check=False)
    return listed.stdout


def show(name, value):
    print(f"{name:<58} {value}", flush=True)


def at_rest(nodes):
    """Every gauge that must be zero, over all nodes."""
    left = {}
    for node in nodes:
        for line in node.get("/metrics")[1].splitlines():
            for name in REST:
                if line.startswith(f"starling_{name}") and float(line.rsplit(" ", 1)[1]) != 0:
                    left[f"{node.folder.name} {line.rsplit(' ', 1)[0]}"] = line.rsplit(" ", 1)[1]
    return left


def one_process(args, root, texts):
    begun = time.perf_counter()
    node = Node(args, ["up"], root / "one", "--bind", "127.0.0.1:0", "--model", str(args.model))
    wait("health", 10, lambda: node.get("/health")[0] == 200)
    show("start to /health ok, model loaded", f"{time.perf_counter() - begun:.2f} s")
    cold, warm = [], []
    for turn in range(5):
        prompt = f"Log {turn}. " + " ".join(f"entry {turn * 1000 + i} was read;" for i in range(190))
        _, first, _ = complete(node, prompt, 4, stream=True)
        _, again, _ = complete(node, prompt, 4, stream=True)
        cold.append(first)
        warm.append(again)
    _, usage, _ = complete(node, prompt, 4)
    cold, warm = statistics.median(cold), statistics.median(warm)
    show(f"TTFT of {usage['prompt_tokens']} tokens: uncached, cached, ratio",
         f"{cold * 1000:.0f} ms, {warm * 1000:.0f} ms, {warm / cold:.3f}")
    first = [complete(node, text)[0] for text in texts]
    again = [complete(node, text) for text in texts]
    show("greedy: prefix hit equals no cache", f"{sum(a == b[0] for a, b in zip(first, again))} of {len(texts)}")
    show("  cached tokens of the second round",
         sum(usage["prompt_tokens_details"]["cached_tokens"] for _, usage, _ in again))
    batch = [None] * len(texts)

    def ask(index):
        batch[index] = complete(node, texts[index])[0]

    together(ask, len(texts))
    show(f"greedy: {len(texts)} at once equal one at a time",
         f"{sum(a == b for a, b in zip(first, batch))} of {len(texts)}")
    complete(node, "warm", 1)
    marks = []
    for turn in range(args.requests):
        complete(node, f"Short request {turn % 50}", 2)
        if turn in (args.requests // 10, args.requests - 1):
            marks.append(node.rss_mib())
    show(f"resident after {args.requests // 10} and {args.requests} short requests",
         f"{marks[0]:.1f} MiB, {marks[1]:.1f} MiB")
    wait("rest", 5, lambda: not at_rest([node]))
    show("gauges not zero at rest, one process", at_rest([node]) or "none")
    node.end()
    return first


def together(work, count):
    threads = [threading.Thread(target=work, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def worker(args, root, name, seed):
    key = str(root / "front" / "cluster.key")
    return Node(args, ["join", seed], root / name, "--role", "worker", "--name", name, "--key-file", key,
                "--model", str(args.model), "--threads", "1")


def three_processes(args, root, texts, alone):
    key = root / "front" / "cluster.key"
    key.parent.mkdir()
    subprocess.run([args.binary, "keys", "new", str(key)], check=True, capture_output=True)
    seed = f"127.0.0.1:{free_port()}"
    front = Node(args, ["join", "127.0.0.1:1"], root / "front", "--role", "router,gateway", "--name", "front",
                 "--bind", seed, "--key-file", str(key))
    workers = {name: worker(args, root, name, seed) for name in ("w1", "w2")}
    wait("model", 10, lambda: '"SmolLM2' in front.get("/v1/models")[1])
    spread = [complete(front, text)[0] for text in texts]
    show("greedy: three processes equal one process", f"{sum(a == b for a, b in zip(alone, spread))} of {len(texts)}")
    results = [None] * 8
    started = threading.Barrier(9)

    def ask(index):
        started.wait()
        results[index] = complete(front, f"{texts[index]} ({index})", 400, stream=True, ignore_eos=True)

    threads = [threading.Thread(target=ask, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    started.wait()
    running = lambda name: re.search(r"sequences_running (\d+)", workers[name].get("/metrics")[1])
    wait("both busy", 10, lambda: all(m and int(m.group(1)) > 0 for m in (running("w1"), running("w2"))))
    workers["w1"].process.kill()
    killed = time.perf_counter()
    text, _, error = complete(front, "A new request after the kill", 4)
    show("kill -9: a new request at once", f"{'answered' if error is None else error} in {time.perf_counter() - killed:.2f} s")
    gone = wait("gone", 15, lambda: '"w1"' not in instances(args, front))
    show("kill -9: out of `starling instances` after", f"{time.perf_counter() - killed:.2f} s" if gone == gone else "never")
    for thread in threads:
        thread.join()
    whole = sum(error is None for _, _, error in results)
    show("kill -9: of 8 streams, whole / ended with a typed error",
         f"{whole} / {sum(error is not None and bool(error.get('type')) for _, _, error in results)}")
    workers["w1"] = worker(args, root, "w1", seed)
    ready = time.perf_counter()
    served = wait("served", 10, lambda: (complete(front, f"{time.perf_counter()} to whom it may concern", 2),
                                         "tokens_generated_total{worker=\"0\"}" in workers["w1"].get("/metrics")[1])[1])
    show("restart under the same name: serves after ready in", f"{served:.2f} s")
    workers["w2"].process.send_signal(signal.SIGSTOP)
    threading.Event().wait(args.freeze)
    show("frozen: left the table", '"w2"' not in instances(args, front))
    workers["w2"].process.send_signal(signal.SIGCONT)
    thawed = time.perf_counter()
    tables = [front, workers["w1"], workers["w2"]]
    wait("back", 30, lambda: all('"w2"' in instances(args, node) and '"w1"' in instances(args, node) for node in tables))
    show(f"kill -STOP {args.freeze} s, -CONT: back in every table after", f"{time.perf_counter() - thawed:.2f} s")
    wait("rest", 10, lambda: not at_rest(tables))
    show("gauges not zero at rest, three processes", at_rest(tables) or "none")
    for node in (*workers.values(), front):
        node.end()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--binary", default=str(HERE / "target/release/starling"))
    parser.add_argument("--model", type=pathlib.Path, default=DEFAULT_MODEL)
    parser.add_argument("--freeze", type=int, default=30)
    parser.add_argument("--requests", type=int, default=2000)
    args = parser.parse_args()
    listed = json.loads((HERE / "bench/prompts.json").read_text(encoding="utf-8"))
    lead = "This is note {} of a long series; each was written by another hand, on another day, and read by no one. " * 2
    texts = [lead.format(at, at) + entry["text"] for at, entry in enumerate(listed) if entry["text"] != "LONG"][:8]
    with tempfile.TemporaryDirectory() as folder:
        root = pathlib.Path(folder)
        alone = one_process(args, root, texts)
        three_processes(args, root, texts, alone)


if __name__ == "__main__":
    os.environ.setdefault("RUST_BACKTRACE", "0")
    main()
