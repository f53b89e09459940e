"""llama.cpp (PyPI `xllamacpp`, prebuilt) as a yardstick on the same GGUF.

  python bench/llama_cpp.py speed  --model FILE [--threads 2] [--repeat 3]   one JSON line of tokens a second
  python bench/llama_cpp.py greedy --model FILE [--tokens 32]                one JSON line a prompt of prompts.json

`speed` reports: prefill_128, prefill_512, prefill_2000, decode_b1, decode_b4, decode_b8, decode_b16. Each is the
median of the repeats. Prefill comes from the server's own timings; decode with a batch is all tokens over the wall
time from the last first token to the first last token, so that only the full batch counts.
"""

import argparse
import json
import os
import statistics
import sys
import threading
import time
import urllib.request

HERE = os.path.dirname(os.path.abspath(__file__))
# End tokens of the default model, which `ignore_eos` keeps from being chosen.
END_TOKENS = {0, 2}
PARAGRAPH = (
    "The harbour woke before the town did. Nets were mended under lamps, and the smell of tar went up the stairs of "
    "the old warehouse where the ledgers were kept. Every crate had a number, every number a line, and every line was "
    "read aloud twice before the tide turned. "
)


def prompts():
    """The fixed prompts; `LONG` stands for a text of about 1,000 tokens."""
    with open(os.path.join(HERE, "prompts.json"), encoding="utf-8") as file:
        listed = json.load(file)
    return [(p["name"], PARAGRAPH * 18 if p["text"] == "LONG" else p["text"]) for p in listed]


def start(model, threads, parallel, exact=False):
    """A server; `exact` keeps keys and values in f32 and does attention step by step in f32."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    if exact:
        params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
        params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    params.model.path = model
    params.n_ctx = 4096 * parallel
    params.n_parallel = parallel
    params.cpuparams.n_threads = threads
    params.cpuparams_batch.n_threads = threads
    return xllamacpp.Server(params)


def post(server, path, body, stream=False):
    request = urllib.request.Request(
        server.listening_address + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    answer = urllib.request.urlopen(request, timeout=600)
    return answer if stream else json.load(answer)


def prefill(server, tokens, repeat):
    rates = []
    for turn in range(repeat):
        ids = [100 + (turn * 7919 + i * 31) % 40000 for i in range(tokens)]
        body = {"prompt": ids, "n_predict": 1, "temperature": 0, "cache_prompt": False}
        timings = post(server, "/completion", body)["timings"]
        rates.append(timings["prompt_n"] / timings["prompt_ms"] * 1000)
    return statistics.median(rates)


def decode_once(server, batch, tokens):
    stamps = [[] for _ in range(batch)]

    def one(index):
        body = {
            "prompt": [200 + index, 300, 400 + index, 500, 600, 700, 800, 900],
            "n_predict": tokens, "temperature": 0, "ignore_eos": True, "stream": True, "cache_prompt": False,
        }
        for line in post(server, "/completion", body, stream=True):
            if line.startswith(b"data:"):
                stamps[index].append(time.perf_counter())

    threads = [threading.Thread(target=one, args=(i,)) for i in range(batch)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    begin, end = max(s[0] for s in stamps), min(s[-1] for s in stamps)
    counted = sum(sum(begin < t <= end for t in s) for s in stamps)
    return counted / (end - begin)


def speed(args):
    result = {"engine": "llama.cpp", "threads": args.threads}
    server = start(args.model, args.threads, 16)
    wanted = [part.split("_") for part in args.only.split(",")]
    for tokens in (int(number) for kind, number in wanted if kind == "prefill"):
        result[f"prefill_{tokens}"] = round(prefill(server, tokens, args.repeat), 1)
    for batch in (int(number[1:]) for kind, number in wanted if kind == "decode"):
        rates = [decode_once(server, batch, 96) for _ in range(args.repeat)]
        result[f"decode_b{batch}"] = round(statistics.median(rates), 1)
    print(json.dumps(result))


def next_token(server, prompt, bias=()):
    """The likeliest token after `prompt` that is no end token, and, mostly, how far it is ahead of the second."""
    body = {
        "prompt": prompt, "n_predict": 1, "temperature": 0, "n_probs": 8, "ignore_eos": True,
        "cache_prompt": True, "return_tokens": True, "logit_bias": list(bias),
    }
    reply = post(server, "/completion", body)
    token = reply["tokens"][0]
    if bias or "completion_probabilities" not in reply:
        return token, None
    tops = [top for top in reply["completion_probabilities"][0]["top_logprobs"] if top["id"] not in END_TOKENS]
    if tops[0]["id"] != token:
        raise SystemExit(f"the server chose {token}, the likeliest was {tops[0]['id']}")
    return token, tops[0]["logprob"] - tops[1]["logprob"]


def gap_by_bias(server, prompt, token):
    """The gap of a token that is part of a character, of which the server tells no probability: how much has to be
    taken from it before another is chosen, up to 4."""
    low, high = 0.0, 4.0
    for _ in range(11):
        middle = (low + high) / 2
        same = next_token(server, prompt, [[token, -middle]])[0] == token
        low, high = (middle, high) if same else (low, middle)
    return high


def answer(server, prompt, count, with_gaps=True):
    """`count` greedy tokens after `prompt`, no end token among them, and how far each is ahead of the second best."""
    tokens, gaps = [], []
    for _ in range(count):
        token, gap = next_token(server, prompt + tokens)
        if gap is None and with_gaps:
            gap = gap_by_bias(server, prompt + tokens, token)
        tokens.append(token)
        gaps.append(round(gap or 0.0, 4))
    return tokens, gaps


def print_answers(server, count):
    for name, text in prompts():
        ids = post(server, "/tokenize", {"content": text, "add_special": False, "parse_special": True})["tokens"]
        tokens, gaps = answer(server, ids, count)
        print(json.dumps({"name": name, "text": text, "prompt": ids, "tokens": tokens, "gaps": gaps}), flush=True)


def greedy(args):
    print_answers(start(args.model, args.threads, 1), args.tokens)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["speed", "greedy"])
    parser.add_argument("--model", required=True)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--only", default="prefill_128,prefill_512,prefill_2000,decode_b1,decode_b4,decode_b8,decode_b16")
    args = parser.parse_args()
    (speed if args.what == "speed" else greedy)(args)
    sys.stdout.flush()
    os._exit(0)  # the server's threads do not end by themselves


if __name__ == "__main__":
    main()
