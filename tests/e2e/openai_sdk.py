"""The openai SDK against a running node: streaming and unary give the same text, and errors are its own exceptions.

Usage: openai_sdk.py STARLING MODEL. Starts `STARLING up` with the model on free ports in a temporary folder.
"""

import os
import re
import signal
import subprocess
import sys
import tempfile
import threading

import openai

PROMPTS = [
    "What is the capital of Italy?",
    "Write a haiku about birds.",
    "def fibonacci(n):",
    "Wie heißt die Hauptstadt von Österreich?",
    "List three colours, separated by commas.",
]
READY_WITHIN_S = 60


def start(binary, model, folder):
    """A node; (process, base URL, model name)."""
    command = [binary, "up", "--bind", "127.0.0.1:0", "--http", "127.0.0.1:0", "--model", model]
    command += ["--data-dir", os.path.join(folder, "data"), "--workers", "1", "--log-level", "warn"]
    node = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    overdue = threading.Timer(READY_WITHIN_S, node.kill)
    overdue.start()
    for line in node.stdout:
        found = re.match(r"ready name=\S+ node=\S+ http=(\S+) model=(\S+)", line)
        if found:
            overdue.cancel()
            return node, f"http://{found.group(1)}/v1", found.group(2)
    raise SystemExit(f"the node was not ready within {READY_WITHIN_S} s")


def streamed(client, **request):
    """Text, finish reason and usage of a stream."""
    text, finish, usage = "", None, None
    for chunk in client.chat.completions.create(stream=True, stream_options={"include_usage": True}, **request):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text += choice.delta.content or ""
            finish = choice.finish_reason or finish
    return text, finish, usage


def check_same(client, model):
    for prompt in PROMPTS:
        for extra in ({"temperature": 0}, {"temperature": 0.8, "seed": 7, "top_p": 0.9}, {"temperature": 0, "stop": ["\n"]}):
            request = {"model": model, "messages": [{"role": "user", "content": prompt}], "max_tokens": 40, **extra}
            unary = client.chat.completions.create(**request)
            text, finish, usage = streamed(client, **request)
            assert text == unary.choices[0].message.content, (prompt, extra, text, unary.choices[0].message.content)
            assert finish == unary.choices[0].finish_reason, (prompt, extra)
            assert usage.completion_tokens == unary.usage.completion_tokens, (prompt, extra)
            assert usage.prompt_tokens == unary.usage.prompt_tokens, (prompt, extra)


def check_rest(client, model):
    assert model in [entry.id for entry in client.models.list()]
    many = client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": "Say a word."}], n=3, max_tokens=8, seed=1, logprobs=True, top_logprobs=2
    )
    assert [choice.index for choice in many.choices] == [0, 1, 2]
    assert all(len(token.top_logprobs) == 2 for choice in many.choices for token in choice.logprobs.content)
    legacy = client.completions.create(model=model, prompt="Once upon a time", max_tokens=12, temperature=0)
    chunks = client.completions.create(model=model, prompt="Once upon a time", max_tokens=12, temperature=0, stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == legacy.choices[0].text


def check_errors(client, model):
    message = [{"role": "user", "content": "x"}]
    for request, kind in (
        ({"model": "no-such-model", "messages": message}, openai.NotFoundError),
        ({"model": model, "messages": []}, openai.BadRequestError),
        ({"model": model, "messages": message, "temperature": 9}, openai.BadRequestError),
    ):
        try:
            client.chat.completions.create(**request)
        except kind as error:
            assert error.body["message"], error
        else:
            raise AssertionError(f"{request} was not refused")


def main():
    binary, model = sys.argv[1:3]
    with tempfile.TemporaryDirectory() as folder:
        node, url, name = start(binary, model, folder)
        try:
            client = openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=60)
            check_same(client, name)
            check_rest(client, name)
            check_errors(client, name)
        finally:
            node.send_signal(signal.SIGTERM)
            code = node.wait(timeout=60)
        assert code == 0, f"the node ended with {code}"
    print("openai SDK: streaming and unary agree, errors are typed")


main()
