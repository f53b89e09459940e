"""Token ids of some awkward texts, by llama.cpp, as JSON: golden data of the engine's tokenizer test.

    python bench/tokenizer_llama_cpp.py --model FILE > actors/engine/src/embedded/testdata/tokenizer.json
"""

import argparse
import json
import os

import llama_cpp

TEXTS = [
    "Hello, world!",
    "  two leading spaces and a trailing one ",
    "It's we're they'll I'd don't CAN'T",
    "12345 3.14159 1,000,000 2026-11-29",
    "line one\nline two\r\n\r\n\tindented",
    "fn main() { println!(\"{}\", a[0] + b_c->d); }",
    "    def f(x):\n        return x**2  # squared\n",
    "naïve café façade Ærøskøbing",
    "日本語の文章です。漢字とかな。",
    "中文没有空格",
    "안녕하세요 세계",
    "Привет, мир! Ещё раз.",
    "مرحبا بالعالم",
    "नमस्ते दुनिया",
    "👩‍👩‍👧‍👦 family, 🏳️‍🌈 flag, 🤷🏽‍♀️",
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
    "text<|endoftext|>more",
    "<|im_start|><|im_start|> <|im_end|",
    "a\u00a0b\u2003c\u200bd\ufeffe",
    "\x01\x02\x07 control \x1b[0m",
    "ααββ ∑∫√ ≤≥ €£¥",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "",
    " ",
    "\n\n\n   \n",
]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    server = llama_cpp.start(parser.parse_args().model, 2, 1)
    lines = []
    for text in TEXTS:
        body = {"content": text, "add_special": False, "parse_special": True}
        lines.append(json.dumps({"text": text, "ids": llama_cpp.post(server, "/tokenize", body)["tokens"]}))
    print("[\n" + ",\n".join(lines) + "\n]", flush=True)
    os._exit(0)  # the server's threads do not end by themselves


if __name__ == "__main__":
    main()
