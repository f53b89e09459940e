"""A real llama.cpp server behind `starling up --engine llama.cpp`: are answers those of the server itself?

    cargo build --release && python bench/sidecar.py --model FILE [--engine openai] [--binary target/release/starling] [--tokens 32]

Starts two servers (PyPI `xllamacpp`) and a node in front of each, asks every prompt of prompts.json of one server alone and of
the cluster, and compares the texts; with `--engine openai` over text alone; then measures the time to the first token through the cluster and without it, stops
the server in whose hands a long answer is, and looks whether that goes on at the other. Needs `pip install xllamacpp`.
"""

import argparse
import http.client
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, HERE)
import llama_cpp  # noqa: E402


def serve(model, threads):
    """The body of a child process: a server until the process is ended."""
    server = llama_cpp.start(model, threads, 4)
    print(server.listening_address, flush=True)
    while True:
        time.sleep(60)


class Server:
    """A llama.cpp server in a process of its own, which can be killed."""

    def __init__(self, args):
        line = [sys.executable, os.path.abspath(__file__), "--model", args.model, "--serve", str(args.threads)]
        self.process = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        self.url = self.process.stdout.readline().strip()

    def kill(self):
        self.process.kill()
        self.process.wait()


class Node:
    """A node of Starling in front of a server."""

    def __init__(self, args, server, folder, seed=None):
        verb = ["join", seed.address, "--key-file", os.path.join(seed.folder, "cluster.key")] if seed else ["up"]
        line = [args.binary, *verb, "--engine", args.engine, "--engine-url", server.url, "--model", args.model]
        line += ["--bind", "127.0.0.1:0", "--data-dir", folder, "--log-level", "warn"]
        line += [] if seed else ["--http", "127.0.0.1:0"]
        self.folder = folder
        self.process = subprocess.Popen(line, stdout=subprocess.PIPE, text=True)
        for text in self.process.stdout:
            if text.startswith("ready "):
                facts = dict(pair.split("=", 1) for pair in text.split()[1:])
                break
        self.address, self.http, self.model = facts["node"], facts["http"], facts["model"]
        threading.Thread(target=self.process.stdout.read, daemon=True).start()

    def end(self):
        self.process.terminate()
        self.process.wait()


def stream(address, path, body):
    """The events of an answer as (seconds, JSON)."""
    link = http.client.HTTPConnection(address.removeprefix("http://"), timeout=120)
    begun = time.perf_counter()
    link.request("POST", path, json.dumps(body | {"stream": True}), {"Content-Type": "application/json"})
    answer = link.getresponse()
    if answer.status != 200:
        raise RuntimeError(answer.read()[:400])
    for line in answer:
        data = line.removeprefix(b"data:").strip()
        if line.startswith(b"data:") and data != b"[DONE]":
            yield time.perf_counter() - begun, json.loads(data)


def alone(server, prompt, tokens):
    """Text and time to the first token of a server itself."""
    body = {"prompt": prompt, "n_predict": tokens, "temperature": 0, "cache_prompt": True}
    events = list(stream(server.url, "/completion", body))
    return "".join(event["content"] for _, event in events), events[0][0]


def through(node, prompt, tokens):
    """The same through the cluster."""
    body = {"model": node.model, "prompt": prompt, "max_tokens": tokens, "temperature": 0}
    events = [(at, event) for at, event in stream(node.http, "/v1/completions", body) if event["choices"]]
    first = next(at for at, event in events if event["choices"][0]["text"])
    return "".join(event["choices"][0]["text"] for _, event in events), first


def survive(args, node, servers):
    """Kills the server that computes a long answer; the pieces of text before and after."""
    body = {"model": node.model, "prompt": "Once upon a time", "max_tokens": 200, "temperature": 0}
    body |= {"ignore_eos": True} if args.engine == "llama.cpp" else {}
    before, after, killed = "", "", None
    for _, event in stream(node.http, "/v1/completions", body):
        if "error" in event:
            return before, after, event["error"]
        text = event["choices"][0]["text"] if event["choices"] else ""
        if killed is None:
            before += text
            if len(before) > 100:
                busy = [server for server in servers if slots_busy(server)]
                killed = busy[0] if busy else servers[0]
                killed.kill()
        else:
            after += text
    return before, after, None


def slots_busy(server):
    link = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=10)
    link.request("GET", "/slots")
    return any(slot["is_processing"] for slot in json.load(link.getresponse()))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--binary", default=os.path.join(HERE, "..", "target", "release", "starling"))
    parser.add_argument("--engine", choices=["llama.cpp", "openai"], default="llama.cpp")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        return serve(args.model, args.serve)
    servers, nodes = [Server(args), Server(args)], []
    with tempfile.TemporaryDirectory() as folder:
        try:
            nodes.append(Node(args, servers[0], os.path.join(folder, "a")))
            nodes.append(Node(args, servers[1], os.path.join(folder, "b"), nodes[0]))
            report(args, servers, nodes)
        finally:
            for one in nodes:
                one.end()
            for one in servers:
                one.kill()


def report(args, servers, nodes):
    same, odd, own, ours = 0, [], [], []
    for name, prompt in llama_cpp.prompts():
        # Once for the cache, so that both are asked with the same blocks computed.
        alone(servers[0], prompt, 1), through(nodes[0], prompt, 1)
        wanted, first = alone(servers[0], prompt, args.tokens)
        got, later = through(nodes[0], prompt, args.tokens)
        own.append(first)
        ours.append(later)
        same += wanted == got
        odd += [] if wanted == got else [name]
    print(json.dumps({"prompts": len(own), "same_text": same, "different": odd}))
    ms = lambda times: round(statistics.median(times) * 1000, 1)  # noqa: E731
    print(json.dumps({"first_token_ms_alone": ms(own), "first_token_ms_through": ms(ours)}))
    whole, _ = alone(servers[0], "Once upon a time", 200)
    before, after, error = survive(args, nodes[0], servers)
    print(json.dumps({"killed_after_characters": len(before), "after_it": len(after), "error": error}))
    print(json.dumps({"continued_as_alone": (before + after).startswith(whole[:300])}))


if __name__ == "__main__":
    main()
