#!/usr/bin/env python3
"""Prefill and decode on different workers, with the real model and real processes.

    python3 bench/split.py [--binary target/release/starling] [--model FILE] [--prompts 20]

The same prompts go, greedily, to one node without roles, to a prefill and a decode worker in one process, and to two
nodes; then the prefill node is killed (-9) or stopped at a moment of the prompt's computation. Prints TTFT (ms), how many
texts are those of the first run, and the tickets still open at the end. Exits with 1 when a text differs, a prompt was not split, or a ticket is open.
"""
import argparse, json, os, re, signal, statistics, subprocess, sys, tempfile, threading, time, urllib.request

HOME, HTTP, NODE = tempfile.mkdtemp(prefix="split-"), "127.0.0.1:8190", "127.0.0.1:7590"
MOMENTS = [(0.15, signal.SIGKILL), (0.35, signal.SIGKILL), (0.55, signal.SIGKILL), (0.75, signal.SIGKILL), (0.3, signal.SIGSTOP), (0.6, signal.SIGSTOP)]


def start(arguments):
    log = open(os.path.join(HOME, "log"), "ab")
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=log, text=True)
    for line in process.stdout:
        if line.startswith("ready"):
            return process
    sys.exit(f"{' '.join(arguments)} did not start; see {HOME}/log")


def end(process):
    process.kill()
    process.wait()


def up(options, workers, role):
    arguments = [options.binary, "up", "--name", "box", "--bind", NODE, "--http", HTTP, "--model", options.model]
    return start(arguments + ["--workers", workers, "--worker-role", role, "--data-dir", f"{HOME}/box"])


def join(options, name, port, role):
    arguments = [options.binary, "join", NODE, "--name", name, "--bind", f"127.0.0.1:{port}", "--role", "worker", "--model", options.model]
    process = start(arguments + ["--workers", "1", "--worker-role", role, "--data-dir", f"{HOME}/{name}", "--key-file", f"{HOME}/box/cluster.key"])
    until(lambda: listed(options, name), f"{name} is routable")
    return process


def listed(options, name):
    rows = subprocess.run([options.binary, "instances", "--node", NODE, "--key-file", f"{HOME}/box/cluster.key"], capture_output=True, text=True).stdout
    return any(re.search(rf"\b{name}\b.*alive +yes", row) for row in rows.splitlines())


def until(holds, what):
    deadline = time.time() + 30
    while not holds():
        if time.time() > deadline:
            sys.exit(f"not within 30 s: {what}")
        time.sleep(0.05)


def prompt(number):
    kinds = ["red", "old", "shy", "odd", "big", "sad"] * 7
    foxes = " ".join(f"The {kind} fox number {number * 7 + place} sees the river and counts stones." for place, kind in enumerate(kinds))
    return f"Story number {number}. {foxes} What does the fox do?"


def ask(options, text):
    body = {"model": options.served, "temperature": 0, "max_tokens": 24, "stream": True, "messages": [{"role": "user", "content": text}]}
    request = urllib.request.Request(f"http://{HTTP}/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"})
    begun, first, answer = time.time(), None, ""
    for line in urllib.request.urlopen(request, timeout=120):
        if line.startswith(b"data: {"):
            for choice in json.loads(line[6:])["choices"]:
                piece = choice["delta"].get("content") or ""
                first = first or (time.time() - begun if piece else None)
                answer += piece
    return answer, 1e3 * (first or 0)


def metric(pattern):
    text = urllib.request.urlopen(f"http://{HTTP}/metrics", timeout=10).read().decode()
    return sum(float(line.split()[-1]) for line in text.splitlines() if re.match(pattern, line))


def run(options, name, whole):
    answers = [ask(options, prompt(number)) for number in range(options.prompts)]
    same = sum(answer == expected for (answer, _), expected in zip(answers, whole)) if whole else len(answers)
    print(f"{name}: TTFT p50 {statistics.median(ttft for _, ttft in answers):.0f} ms, {same} of {len(answers)} texts the same", flush=True)
    return [answer for answer, _ in answers], same == len(answers)


def closed():
    until(lambda: metric(r"starling_transfer_tickets_open") == 0, "no ticket is open")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--binary", default="target/release/starling")
    parser.add_argument("--model", default=os.path.expanduser("~/.cache/starling/models/SmolLM2-135M-Instruct.Q4_1.gguf"))
    parser.add_argument("--served", default="SmolLM2-135M-Instruct")
    parser.add_argument("--prompts", type=int, default=20)
    options = parser.parse_args()
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, prompts of about 620 tokens, answers of 24")
    complete = r'starling_worker_sourced_total\{kind="split",outcome="complete"\}'
    good = []

    box = up(options, "1", "both")
    whole, _ = run(options, "one worker", None)
    end(box)

    box = up(options, "2", "both")
    for worker, role in [("box/0", "prefill"), ("box/1", "decode")]:
        subprocess.run([options.binary, "role", worker, role, "--node", NODE, "--key-file", f"{HOME}/box/cluster.key"], check=True, stdout=subprocess.DEVNULL)
    good.append(run(options, "split in one process", whole)[1] and metric(complete) == options.prompts)
    closed()
    end(box)

    box = up(options, "1", "decode")
    other = join(options, "far", 7591, "prefill")
    good.append(run(options, "split between two nodes", whole)[1] and metric(complete) == options.prompts)
    closed()
    end(other)
    end(box)

    box = up(options, "1", "decode")
    same = 0
    for number, (moment, kind) in enumerate(MOMENTS):
        other = join(options, f"far{number}", 7592 + number, "prefill")
        timer = threading.Timer(moment, other.send_signal, [kind])
        timer.start()
        answer, ttft = ask(options, prompt(number))
        timer.join()
        same += answer == whole[number]
        print(f"  {kind.name} after {moment} s: TTFT {ttft:.0f} ms")
        end(other)
    print(f"prefill node lost: {same} of {len(MOMENTS)} texts the same")
    good.append(same == len(MOMENTS))
    closed()
    print("tickets open at the end: 0")
    end(box)
    sys.exit(0 if all(good) else 1)


if __name__ == "__main__":
    main()
