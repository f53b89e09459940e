"""What a disk tier saves after a restart: time to the first token of a long prompt, computed and read back from disk.

  python3 bench/tier_restart.py [--binary target/release/starling] [--model FILE] [--tokens 1500] [--rounds 3]

Each round starts a node with one worker and an empty disk tier, times the prompt (computed), ends the node in order, starts
it again and times the same prompt (from disk). Both answers must be the same text. Two short requests go before each timed
one, so that neither pays for the first use of anything. Prints a line a round and the medians with their ratio (bar: 0.4).
Nothing but the standard library.
"""

import argparse
import http.client
import json
import pathlib
import random
import shutil
import signal
import statistics
import subprocess
import tempfile
import time

WORDS = ("river stone cloud amber field north quiet light copper valley summer branch harbour silver meadow night wind "
         "garden bridge coast forest island morning path shadow spring").split()


def prompt(tokens, seed):
    """About `tokens` tokens: a common word with its space is one."""
    chance = random.Random(seed)
    return " ".join(chance.choice(WORDS) for _ in range(tokens))


def start(binary, model, folder):
    command = [binary, "up", "--http", "127.0.0.1:0", "--bind", "127.0.0.1:0", "--workers", "1", "--kv-mib", "128",
               "--kv-disk", str(folder / "kv"), "--kv-disk-size", "4GiB", "--data-dir", str(folder / "data"),
               "--name", "tier-bench", "--log-level", "warn"]
    if model:
        command += ["--model", model]
    node = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    for _ in range(600):
        try:
            facts = json.loads((folder / "data" / "node.json").read_text())
            if facts.get("http") and facts.get("pid") == node.pid:
                return node, facts["http"]
        except (OSError, ValueError):
            pass
        if node.poll() is not None:
            raise SystemExit(f"the node ended with {node.returncode}")
        time.sleep(0.1)
    raise SystemExit("the node is not ready")


def stop(node):
    node.send_signal(signal.SIGTERM)
    node.wait(timeout=60)


def ask(address, text, tokens):
    """(milliseconds to the first token, the text, usage)."""
    connection = http.client.HTTPConnection(address, timeout=300)
    models = http.client.HTTPConnection(address, timeout=30)
    models.request("GET", "/v1/models")
    model = json.loads(models.getresponse().read())["data"][0]["id"]
    body = {"model": model, "prompt": text, "max_tokens": tokens, "temperature": 0, "stream": True,
            "stream_options": {"include_usage": True}}
    begun = time.perf_counter()
    connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
    response, first, said, usage = connection.getresponse(), None, "", {}
    if response.status != 200:
        raise SystemExit(f"{response.status}: {response.read()[:300]}")
    for line in response:
        if not line.startswith(b"data: ") or line.strip() == b"data: [DONE]":
            continue
        event = json.loads(line[6:])
        usage = event.get("usage") or usage
        for choice in event.get("choices", []):
            if choice.get("text"):
                first = first or time.perf_counter()
                said += choice["text"]
    return (first - begun) * 1e3, said, usage


def timed(address, text, tokens):
    for seed in (1, 2):
        ask(address, prompt(20, seed), 4)
    return ask(address, text, tokens)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--binary", default="target/release/starling")
    parser.add_argument("--model")
    parser.add_argument("--tokens", type=int, default=1500)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    computed, restored = [], []
    for number in range(arguments.rounds):
        folder = pathlib.Path(tempfile.mkdtemp(prefix="tier-bench-"))
        try:
            text = prompt(arguments.tokens, 100 + number)
            node, address = start(arguments.binary, arguments.model, folder)
            cold, first, usage = timed(address, text, 16)
            stop(node)
            kept = sum(file.stat().st_size for file in (folder / "kv").rglob("blocks"))
            node, address = start(arguments.binary, arguments.model, folder)
            warm, second, again = timed(address, text, 16)
            stop(node)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        same = first == second
        cached = (again.get("prompt_tokens_details") or {}).get("cached_tokens")
        print(f"round {number + 1}: {usage.get('prompt_tokens')} tokens, computed {cold:.0f} ms, after the restart "
              f"{warm:.0f} ms with {cached} tokens from disk ({kept / 2**20:.0f} MiB kept), texts "
              f"{'equal' if same else 'DIFFER'}", flush=True)
        if not same:
            raise SystemExit("the texts differ")
        computed.append(cold)
        restored.append(warm)
    cold, warm = statistics.median(computed), statistics.median(restored)
    print(f"medians: computed {cold:.0f} ms, restored {warm:.0f} ms: {warm / cold:.3f} (bar 0.4)")


if __name__ == "__main__":
    main()
