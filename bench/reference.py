"""The greedy answers that the embedded engine is judged by: the file's weights, computed without rounding activations.

llama.cpp rounds activations to eight bits before it multiplies them with quantized weights, so on a quantized file it
differs from itself whenever anything is computed in another order. Here the weights are widened to f32 first, exactly,
and run by llama.cpp with f32 keys and values and without flash attention: nothing is rounded but f32 sums.

  python bench/reference.py golden --model FILE > actors/engine/src/embedded/testdata/greedy.jsonl
  python bench/reference.py llama  --model FILE     how many answers llama.cpp on the file itself shares with the golden ones

Needs `pip install xllamacpp gguf numpy`. The f32 file, 540 MB for the default model, is kept in the cache folder.
"""

import argparse
import json
import os
import sys

import llama_cpp

GOLDEN = os.path.join(llama_cpp.HERE, "..", "actors", "engine", "src", "embedded", "testdata", "greedy.jsonl")


def widened(model):
    """The path of `model` with every tensor as f32; written on first use."""
    folder = os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "starling", "reference")
    path = os.path.join(folder, os.path.basename(model).removesuffix(".gguf") + ".f32.gguf")
    if os.path.exists(path):
        return path
    import gguf

    os.makedirs(folder, exist_ok=True)
    reader = gguf.GGUFReader(model)
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(path + ".part", architecture)
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue
        value = int(gguf.LlamaFileType.ALL_F32) if name == "general.file_type" else field.contents()
        inner = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(name, value, field.types[0], inner)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, gguf.dequantize(tensor.data, tensor.tensor_type).astype("float32"))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    os.replace(path + ".part", path)
    return path


def llama(args):
    with open(GOLDEN, encoding="utf-8") as file:
        golden = [json.loads(line) for line in file]
    server = llama_cpp.start(args.model, args.threads, 1)
    equal = 0
    for case in golden:
        tokens, _ = llama_cpp.answer(server, case["prompt"], len(case["tokens"]), with_gaps=False)
        at = next((i for i, pair in enumerate(zip(tokens, case["tokens"])) if pair[0] != pair[1]), None)
        equal += at is None
        if at is not None:
            print(f"{case['name']}: parts at token {at}, where the reference's gap is {case['gaps'][at]}", flush=True)
    print(f"llama.cpp on the file: {equal} of {len(golden)} answers equal the reference's", flush=True)


def golden(args):
    llama_cpp.print_answers(llama_cpp.start(widened(args.model), args.threads, 1, exact=True), args.tokens)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["golden", "llama"])
    parser.add_argument("--model", required=True)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=32)
    args = parser.parse_args()
    (golden if args.what == "golden" else llama)(args)
    sys.stdout.flush()
    os._exit(0)  # the server's threads do not end by themselves


if __name__ == "__main__":
    main()
