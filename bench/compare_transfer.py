"""Our transports of KV blocks beside memcpy, bare TCP, bare UCX, NIXL and Mooncake: one run, one table.

Builds one small C program against UCX's headers, nothing else. Before:

    cargo build --release -p starling-bench-transfer
    python -m venv peers && peers/bin/pip install numpy nixl-cu12 libucx-cu12 mooncake-transfer-engine-non-cuda
    python3 bench/compare_transfer.py --ours target/release/transfer --peers-python peers/bin/python

(or STARLING_BENCH_PEERS_PYTHON). Without peers the table has ours and the limits alone. Every cell is the median over
rounds of the medians of one run; in each round every program runs once, in turn, so all see the same machine.
2,000 scattered pages of 16 KiB out of 256 MiB on each side, and single blocks of 64 KiB, 1 MiB and 64 MiB. Ours compare
an xxh3 of each page, the others compare nothing.
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent / "transfer" / "peers"
# Label, bytes of a page, pages, transfers of one run: as in bench/transfer/src/loads.rs.
LOADS = [("pages", 16 << 10, 2000, 9), ("64k", 64 << 10, 1, 200), ("1m", 1 << 20, 1, 50), ("64m", 64 << 20, 1, 7)]
ASKED = [f"{label}={page},{pages},{repeats}" for label, page, pages, repeats in LOADS]


def run(words, env=None, limit=180):
    """The JSON lines that a program prints; none when it fails."""
    try:
        done = subprocess.run([str(word) for word in words], env={**os.environ, **(env or {})}, capture_output=True,
                              text=True, timeout=limit)
    except subprocess.TimeoutExpired:
        print(f"# {words[0]} did not end within {limit} s: {words[1:4]}", file=sys.stderr)
        return []
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["nothing"])[-1]
        print(f"# {pathlib.Path(str(words[0])).name} {words[1:4]} failed: {last[:200]}", file=sys.stderr)
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def ucx_of(python):
    """The folder of the UCX wheel beside that python, if it has one."""
    words = "import importlib.util as u, os; s = u.find_spec('libucx'); print(os.path.dirname(s.origin) if s else '')"
    found = subprocess.run([python, "-c", words], capture_output=True, text=True).stdout.strip()
    return pathlib.Path(found) if found else None


def bare_ucx(python, folder):
    """(program, environment) of bare UCX, built against the wheel."""
    wheel = ucx_of(python)
    if wheel is None:
        return None
    program = os.path.join(folder, "ucx_peer")
    words = ["cc", "-O2", HERE / "ucx_peer.c", f"-I{wheel}/include", f"-L{wheel}/lib", "-lucp", "-lucs", "-o", program]
    built = subprocess.run([str(word) for word in words], capture_output=True, text=True)
    if built.returncode != 0:
        print(f"# bare UCX was not built: {built.stderr.strip().splitlines()[:1]}", file=sys.stderr)
        return None
    return program, {"LD_LIBRARY_PATH": f"{wheel}/lib", "UCX_MODULE_DIR": f"{wheel}/lib/ucx", "UCX_LOG_LEVEL": "error"}


def programs(options, folder):
    """What runs in each round: (words, environment)."""
    listed = [([options.ours, "limits"], {}), ([options.ours, "ours"], {})]
    python = options.peers_python
    if not python:
        return listed
    bare = bare_ucx(python, folder)
    if bare:
        for transports in ("posix", "posix,cma", "tcp"):
            listed.append(([bare[0], f"bare UCX {transports}", *ASKED], {**bare[1], "UCX_TLS": transports}))
    loads = [word for load in ASKED for word in ("--load", load)]
    nixl = [python, HERE / "nixl_peer.py", "--name"]
    quiet = {"UCX_LOG_LEVEL": "error"}
    listed.append(([*nixl, "NIXL", "--progress", *loads], quiet))
    listed.append(([*nixl, "NIXL, no progress thread", *loads], quiet))
    listed.append(([*nixl, "NIXL tcp", "--progress", *loads], {**quiet, "UCX_TLS": "tcp"}))
    listed.append(([*nixl, "NIXL tcp, owner polls", "--polling", *loads], {**quiet, "UCX_TLS": "tcp"}))
    listed.append(([python, HERE / "mooncake_peer.py", "--name", "Mooncake tcp", *loads], {"GLOG_minloglevel": "2"}))
    return listed


def table(found):
    """Prints medians and returns them: (way, direction, load) -> ms."""
    medians = {key: statistics.median(values) for key, values in found.items()}
    rows = list(dict.fromkeys(key[:2] for key in found))
    print("| way | | 2,000 × 16 KiB, ms (rounds) | GB/s | 64 KiB, µs | 1 MiB, ms | 64 MiB, ms | GB/s |")
    print("|---|---|---|---|---|---|---|---|")
    for way, direction in rows:
        cell = {label: medians.get((way, direction, label)) for label, *_ in LOADS}
        if None in cell.values():
            print(f"| {way} | {direction} | failed |")
            continue
        spread = found[(way, direction, "pages")]
        rate = [2000 * (16 << 10) / cell["pages"] / 1e6, (64 << 20) / cell["64m"] / 1e6]
        print(f"| {way} | {direction} | {cell['pages']:.2f} ({min(spread):.2f} to {max(spread):.2f}) | {rate[0]:.2f} "
              f"| {cell['64k'] * 1e3:.0f} | {cell['1m']:.3f} | {cell['64m']:.1f} | {rate[1]:.2f} |")
    return medians


def bars(medians):
    """The batch against the peers, best direction of each."""

    def best(start):
        values = [ms for (way, _, load), ms in medians.items() if load == "pages" and way.startswith(start)]
        return min(values) if values else None

    def both(way):
        return [medians.get((way, direction, "pages")) for direction in ("pull", "push")]

    def say(name, ours, limit, met):
        if None in ours or limit is None:
            return
        print(f"- {name}: pull {ours[0]:.2f} ms, push {ours[1]:.2f} ms against {limit:.2f} ms: "
              f"{ours[0] / limit:.2f} × and {ours[1] / limit:.2f} × ({met})")

    say("shm against NIXL's best", both("shm"), best("NIXL"), "bar: at most 0.5 ×")
    copy = medians.get(("memcpy", "copy", "pages"))
    say("shm against memcpy of the same pages in one process", both("shm"), copy, "bar: at most 1 / 0.9 = 1.11 ×")
    say("ucx against bare UCX's best", both("ucx"), best("bare UCX"), "bar: at most 1.11 ×")
    say("tcp against NIXL over TCP", both("tcp"), best("NIXL tcp"), "bar: at most 1 ×")
    say("tcp against Mooncake over TCP", both("tcp"), best("Mooncake"), "bar: far under 1 ×")
    say("tcp against bare TCP", both("tcp"), best("bare tcp"), "no bar")


def faults(options):
    """How soon a killed or stopped peer is told of, and the idle CPU."""
    lines = run([options.ours, "faults", options.runs], limit=600)
    print("\n| fault on the way | | runs | told after, ms: median | worst | as |\n|---|---|---|---|---|---|")
    for line in lines:
        since = "" if line["fault"] == "killed" else " (after the transfer's own deadline)"
        print(f"| {line['way']}, owner {line['fault']}{since} | {line['direction']} | {len(line['ms'])} "
              f"| {statistics.median(line['ms']):.1f} | {max(line['ms']):.1f} | {', '.join(line['outcomes'])} |")
    for line in run([options.ours, "idle", 10]):
        share = ", ".join(f"{who} {value * 100:.3f} %" for who, value in line["idle"].items())
        print(f"- idle CPU of an open session, {line['way']}: {share}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ours", required=True)
    parser.add_argument("--peers-python", default=os.environ.get("STARLING_BENCH_PEERS_PYTHON"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--runs", type=int, default=10, help="of each fault")
    options = parser.parse_args()
    model = open("/proc/cpuinfo").read().split("model name")[1].splitlines()[0].strip(" \t:")
    with tempfile.TemporaryDirectory() as folder:
        listed = programs(options, folder)
        print(f"machine: {model}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, {options.rounds} rounds\n")
        found = {}
        for at in range(options.rounds):
            for words, env in listed:
                for line in run(words, env):
                    key = (line["way"], line["direction"], line["load"])
                    found.setdefault(key, []).append(statistics.median(line["ms"]))
            print(f"# round {at + 1}, load {os.getloadavg()[0]:.1f}", file=sys.stderr)
    medians = table(found)
    print()
    bars(medians)
    faults(options)


if __name__ == "__main__":
    main()
