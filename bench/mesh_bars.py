"""The bars of the mesh with real processes on a network of their own, at full length: one table, worst figures first to see.

  sudo python3 bench/mesh_bars.py [--binary target/release/starling] [--rounds 3] [--only NAME] [--short] [--json FILE]

Runs the tests of `tests/system` that are called `mesh_`, `mem_..._mesh_` and the like, with faults as long as the bars ask
(frozen and split 60 s, cut one way 300 s), one after the other, `--rounds` times, and gathers the figures they note.
Needs root, `ip` of iproute2 and /dev/net/tun. Nothing but the standard library.
"""

import argparse
import json
import os
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).resolve().parent.parent


def test_program():
    """The built program of the whole-system tests."""
    built = subprocess.run(
        ["cargo", "test", "--locked", "-p", "starling", "--test", "system", "--no-run", "--message-format=json"],
        cwd=HERE, stdout=subprocess.PIPE, check=True, text=True)
    messages = (json.loads(line) for line in built.stdout.splitlines() if line.startswith("{"))
    found = [m["executable"] for m in messages if m.get("executable") and m["target"]["name"] == "system"]
    return found[-1]


def tests_of(program, only):
    listed = subprocess.run([program, "--list", "--include-ignored"], stdout=subprocess.PIPE, check=True, text=True)
    names = [line.removesuffix(": test") for line in listed.stdout.splitlines() if line.endswith(": test")]
    return [name for name in names if name.startswith("mesh_") and only in name]


def run(program, name, environment, limit):
    """One test: how it ended, and the first line of its failure."""
    begun = time.perf_counter()
    try:
        done = subprocess.run([program, "--exact", name, "--include-ignored", "--nocapture"], env=environment, cwd=HERE,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
                              timeout=limit, check=False)
        output, ok = done.stdout, done.returncode == 0
    except subprocess.TimeoutExpired as late:
        output, ok = (late.stdout or b"").decode(errors="replace"), False
    took = time.perf_counter() - begun
    failure = re.search(r"panicked at [^\n]*\n([^\n]*)", output)
    skipped = re.search(r"skipped: [^\n]*", output)
    if skipped:
        raise SystemExit(f"{name}: {skipped.group(0)}")
    why = "" if ok else (failure.group(1) if failure else f"no end within {limit} s")
    print(f"{'ok' if ok else 'FAILED':<6} {took:7.1f} s  {name}  {why}", flush=True)
    if not ok:
        (pathlib.Path(tempfile.gettempdir()) / "mesh_bars_failed.log").write_text(output)
    return ok, why


def table(figures):
    """Lines of bar, number of tries, median, worst, bar."""
    rows = [("figure", "tries", "median", "worst", "bar", "")]
    for name, tries in figures.items():
        seen = [figure["seen"] for figure in tries]
        ok = all(figure["ok"] for figure in tries)
        rows.append((name, str(len(seen)), f"{statistics.median(seen):.2f}", f"{max(seen):.2f}",
                     f"{tries[0]['bar']:g}", "ok" if ok else "MISSED"))
    widths = [max(len(row[column]) for row in rows) for column in range(6)]
    return "\n".join("  ".join(cell.ljust(width) if at == 0 else cell.rjust(width)
                               for at, (cell, width) in enumerate(zip(row, widths))).rstrip() for row in rows)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--binary", help="the program to start; default: the one cargo builds beside the tests")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="", help="tests whose name contains this")
    parser.add_argument("--short", action="store_true", help="faults as short as in continuous integration")
    parser.add_argument("--json", type=pathlib.Path, help="where figures and failures are written")
    args = parser.parse_args()
    if os.geteuid() != 0:
        raise SystemExit("network namespaces need root")
    program = test_program()
    figures, failures = {}, []
    with tempfile.TemporaryDirectory() as folder:
        kept = pathlib.Path(folder) / "figures.jsonl"
        environment = {**os.environ, "STARLING_FIGURES": str(kept), "STARLING_LONG": "0" if args.short else "1"}
        if args.binary:
            environment["STARLING_TEST_BINARY"] = str(pathlib.Path(args.binary).resolve())
        for _ in range(args.rounds):
            for name in tests_of(program, args.only):
                ok, why = run(program, name, environment, 900)
                if not ok:
                    failures.append({"test": name, "why": why})
        for line in kept.read_text().splitlines() if kept.exists() else []:
            figure = json.loads(line)
            figures.setdefault(figure["name"], []).append(figure)
    print(table(figures))
    for failure in failures:
        print(f"failed: {failure['test']}: {failure['why']}")
    if args.json:
        args.json.write_text(json.dumps({"figures": figures, "failures": failures}, indent=1) + "\n")
    sys.exit(bool(failures) or any(not figure["ok"] for tries in figures.values() for figure in tries))


if __name__ == "__main__":
    main()
