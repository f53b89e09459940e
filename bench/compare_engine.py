"""The embedded engine against llama.cpp on the same file, in turns, so that a busy machine hurts both alike.

    cargo build --release -p starling-bench && python bench/compare_engine.py --model FILE
        [--threads 2] [--rounds 5] [--activations int16] [--only prefill_512,decode_b1,decode_b8]

Each round runs both programs once; the medians of the rounds and their ratios are printed. Needs `pip install xllamacpp`.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
ENGINE = os.path.join(HERE, "..", "target", "release", "engine")
NAMES = ["prefill_128", "prefill_512", "prefill_2000", "decode_b1", "decode_b4", "decode_b8", "decode_b16"]


def ours(args):
    line = [ENGINE, "--json", "--runs", "1", "--model", args.model, "--threads", str(args.threads)]
    line += ["--activations", args.activations, "--only", args.only]
    report = json.loads(subprocess.run(line, check=True, capture_output=True).stdout)
    return report["setting"], {figure["name"]: figure["value"] for figure in report["figures"]}


def theirs(args):
    line = [sys.executable, os.path.join(HERE, "llama_cpp.py"), "speed", "--model", args.model, "--repeat", "1"]
    line += ["--threads", str(args.threads), "--only", args.only]
    done = subprocess.run(line, check=True, capture_output=True)
    return json.loads(done.stdout.splitlines()[-1])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--activations", choices=["int8", "int16"], default="int16")
    parser.add_argument("--only", default=",".join(NAMES))
    args = parser.parse_args()
    rounds = []
    for _ in range(args.rounds):
        setting, left = ours(args)
        rounds.append((left, theirs(args)))
    print(json.dumps(setting | {"activations": args.activations}))
    print(f"{'':<14}{'starling':>10}{'llama.cpp':>11}{'ratio':>7}   median of {args.rounds}, tokens/s")
    for name in args.only.split(","):
        left, right = (statistics.median(pair[i][name] for pair in rounds) for i in (0, 1))
        print(f"{name:<14}{left:>10.1f}{right:>11.1f}{left / right:>7.2f}")


if __name__ == "__main__":
    main()
