"""Generation alongside llama.cpp: the same random weights of Qwen2.5-0.5B's shape, numbers and processor.

    python benchmarks/llama_cpp.py CACHE
    python benchmarks/llama_cpp.py CACHE --dtype int8 --sequences 8

CACHE is a folder outside of the project. The first call builds llama.cpp there, from the source package of
`llama-cpp-python`, with its own options for this processor, and writes the models as GGUF files (3.6 GB). Each call
measures both sides one after the other and joins its figures to those of earlier calls in CACHE/results.json. Column
"others" has the cores that other processes used meanwhile, at the most: rates count only with next to none. On a busy
machine `--processor-time` measures processor time of a decode step on one thread, as the difference of two runs.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from machine import Moment

PACKAGE = "llama-cpp-python==0.3.36"
TARGETS = ("llama-batched-bench", "llama-quantize")
# Ours -> the type of llama.cpp's file.
TYPES = {"float32": "F32", "bfloat16": "BF16", "int8": "Q8_0"}
SEQUENCES, TOKENS, THREADS = (8, 64), 64, 2
GOALS = {8: 1.0, 64: 1.5}  # our tokens per second over theirs
SHORT, LONG, SHORT_PROMPT = 4, 16, 16  # tokens of the two runs of `--processor-time`


class Load(NamedTuple):
    """Work of one run."""

    dtype: str
    sequences: int
    prompt: int = TOKENS
    tokens: int = TOKENS
    threads: int = THREADS


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cache", type=Path, help="folder of the build, the models and the results")
    parser.add_argument("--dtype", action="append", choices=TYPES, help="numbers of the weights; default: all")
    parser.add_argument("--sequences", action="append", type=int, help=f"at a time; default: {SEQUENCES}")
    parser.add_argument("--processor-time", action="store_true", help="measure processor time in place of rates")
    parser.add_argument("--measure-ours", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def qwen():
    """Return Qwen2.5-0.5B's architecture."""
    from mindrlhf.configs.model import ModelConfig

    return ModelConfig(
        vocab_size=151936,
        hidden_size=896,
        intermediate_size=4864,
        num_layers=24,
        num_heads=14,
        num_kv_heads=2,
        head_dim=64,
        rope_theta=1e6,
        attention_bias=True,
        tie_word_embeddings=True,
    )


def source(cache: Path) -> Path:
    """Fetch llama.cpp's source; returns its folder."""
    found = next(cache.glob("llama_cpp_python-*/vendor/llama.cpp"), None)
    if found is None:
        fetch = ("pip", "download", "--no-deps", "--no-binary", ":all:", "--dest", str(cache), PACKAGE)
        subprocess.run((sys.executable, "-m", *fetch), check=True)
        with tarfile.open(next(cache.glob("llama_cpp_python-*.tar.gz"))) as archive:
            archive.extractall(cache, filter="data")
        found = next(cache.glob("llama_cpp_python-*/vendor/llama.cpp"))
    return found


def build(cache: Path) -> Path:
    """Build llama.cpp's programs; returns their folder."""
    folder = cache / "build"
    if not all((folder / "bin" / name).exists() for name in TARGETS):
        options = ("CMAKE_BUILD_TYPE=Release", "GGML_NATIVE=ON", "LLAMA_CURL=OFF", "BUILD_SHARED_LIBS=OFF")
        given = [f"-D{option}" for option in options]
        subprocess.run(("cmake", "-B", str(folder), "-S", str(source(cache)), *given), check=True)
        subprocess.run(("cmake", "--build", str(folder), "-j", str(THREADS), "--target", *TARGETS), check=True)
    return folder / "bin"


def names(model) -> dict[str, str]:
    """Map GGUF's name of each parameter to ours."""
    from mindrlhf.checkpoint.gguf.names import named_rows

    return {name: spec.name for name, spec in named_rows(model, "the model").items()}


def model_file(cache: Path, dtype: str) -> Path:
    """Write the random weights, or convert them; returns the file."""
    file = cache / f"model-{dtype}.gguf"
    if file.exists():
        return file
    if dtype != "float32":
        convert = (build(cache) / "llama-quantize", model_file(cache, "float32"), file, TYPES[dtype])
        subprocess.run(tuple(map(str, convert)), check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        return file
    import gguf

    from mindrlhf import backend
    from mindrlhf.checkpoint.weights import Weights

    model = qwen()
    parameters = Weights(None, model, seed=0).parameters()
    writer = gguf.GGUFWriter(file, "qwen2")
    writer.add_block_count(model.num_layers)
    writer.add_context_length(32768)
    writer.add_embedding_length(model.hidden_size)
    writer.add_feed_forward_length(model.intermediate_size)
    writer.add_head_count(model.num_heads)
    writer.add_head_count_kv(model.num_kv_heads)
    writer.add_rope_freq_base(model.rope_theta)
    writer.add_layer_norm_rms_eps(model.rms_norm_eps)
    writer.add_vocab_size(model.vocab_size)
    writer.add_tokenizer_model("none")
    for theirs, ours in names(model).items():
        writer.add_tensor(theirs, backend.read(parameters[ours]))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def theirs(cache: Path, load: Load) -> dict[str, float]:
    """Run llama.cpp; returns tokens per second of prompts and generation, and processor seconds."""
    positions = (load.prompt + load.tokens) * load.sequences
    sizes = {"-npp": load.prompt, "-ntg": load.tokens, "-npl": load.sequences, "-c": positions}
    threads = {"-t": load.threads, "-tb": load.threads, "-b": 2048, "-ub": 512}
    options = [str(part) for pair in (sizes | threads).items() for part in pair]
    program, model = str(build(cache) / TARGETS[0]), str(model_file(cache, load.dtype))
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    output = run((program, "-m", model, *options, "--output-format", "jsonl"))
    row = json.loads(next(line for line in output.splitlines() if line.startswith("{")))
    spent = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before
    return {"prompts": row["speed_pp"], "generation": row["speed_tg"], "processor_s": spent}


def ours(cache: Path, load: Load) -> dict[str, float]:
    """Run our side in a process of its own; returns the same figures."""
    command = (sys.executable, __file__, str(cache), "--measure-ours", json.dumps(load))
    return json.loads(run(command, OMP_NUM_THREADS=str(load.threads)).splitlines()[-1])


def run(command: tuple[str, ...], **variables: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **variables})
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    return done.stdout


def measure_ours(cache: Path, load: Load) -> dict[str, float]:
    """Generate once to build graphs and once to measure.

    With packed weights, prompts are prefilled in bfloat16 if the processor has fast bfloat16 products.
    """
    import gguf
    import numpy as np

    from mindrlhf.backend.cpu import CPU
    from mindrlhf.backend.process.launch import launch
    from mindrlhf.configs.grpo import SamplingSettings
    from mindrlhf.models.decoder import Decoder
    from mindrlhf.models.initialize import build_parameters
    from mindrlhf.models.packed import PackedWeights
    from mindrlhf.models.parameters import decoded_rows, parameter_table
    from mindrlhf.rollout.engine import Engine
    from mindrlhf.types import Prompt

    launch("CPU")
    model = qwen()
    tensors = {tensor.name: tensor.data for tensor in gguf.GGUFReader(model_file(cache, "float32")).tensors}
    known = {name: tensors[stored] for stored, name in names(model).items()}
    parameters = build_parameters(parameter_table(model), lambda spec: np.array(known[spec.name]))
    float32 = load.dtype == "float32"
    products = "float32" if float32 else CPU.product_dtype("auto")
    operators = CPU.operators(products, "train" if float32 else load.dtype)
    packed = None if float32 else PackedWeights(load.dtype, decoded_rows(model), parameters).packed
    decoder = Decoder(model, parameters, operators, 4 * TOKENS, packed=packed)
    sampling = SamplingSettings(max_new_tokens=load.tokens)
    engine = Engine(model, decoder, sampling, load.sequences, load.prompt, (), seed=0)
    ids = np.random.default_rng(0).integers(0, model.vocab_size, (load.sequences, load.prompt)).astype(np.int32)
    prompts = [Prompt(number, row) for number, row in enumerate(ids)]
    engine.generate(prompts, 1, 0)
    before = time.process_time()
    engine.generate(prompts, 1, 1)
    done, spent = engine.statistics, time.process_time() - before
    rates = {"prompts": load.sequences * load.prompt / done.prefill_s, "generation": done.tokens / done.decode_s}
    return rates | {"processor_s": spent}


def step_time(cache: Path, side: Callable[[Path, Load], dict[str, float]], dtype: str, count: int) -> float:
    """Measure milliseconds of one thread for a decode step."""
    runs = (side(cache, Load(dtype, count, SHORT_PROMPT, tokens, threads=1)) for tokens in (SHORT, LONG))
    short, long = (run["processor_s"] for run in runs)
    return 1000 * (long - short) / (LONG - SHORT)


def table(results: dict[str, dict]) -> str:
    """Describe all results: tokens per second of generation with their goals, and processor time of a step."""
    head = "| weights | sequences | llama.cpp tokens/s | ours | ours / llama.cpp | goal | others |"
    lines = [f"{head} llama.cpp ms | ours | llama.cpp / ours |", "|" + " --- |" * 10]
    for dtype, count in ((dtype, count) for dtype in TYPES for count in SEQUENCES):
        found = results.get(f"{dtype} {count}")
        if found:
            their, our = found["llama.cpp"], found["ours"]
            kind, rates, times = dtype if dtype != "int8" else "int8, Q8_0", "- | - | -", "- | - | -"
            others = max((side["others"] for side in found.values() if "others" in side), default=0.0)
            if "generation" in our:
                their_rate, our_rate = their["generation"], our["generation"]
                rates = f"{their_rate:.0f} | {our_rate:.0f} | {our_rate / their_rate:.2f}"
            if "step_ms" in our:
                times = f"{their['step_ms']:.0f} | {our['step_ms']:.0f} | {their['step_ms'] / our['step_ms']:.2f}"
            lines.append(f"| {kind} | {count} | {rates} | {GOALS[count]:.1f} | {others:.1f} | {times} |")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    if args.measure_ours:
        print(json.dumps(measure_ours(args.cache, Load(*json.loads(args.measure_ours)))))
        return 0
    args.cache.mkdir(parents=True, exist_ok=True)
    file = args.cache / "results.json"
    results = json.loads(file.read_text()) if file.exists() else {}
    for dtype, count in ((dtype, count) for dtype in args.dtype or TYPES for count in args.sequences or SEQUENCES):
        model_file(args.cache, dtype)
        known = results.setdefault(f"{dtype} {count}", {})
        for name, side in (("ours", ours), ("llama.cpp", theirs)):
            own, start = known.setdefault(name, {}), Moment.now()
            if args.processor_time:
                own["step_ms"] = step_time(args.cache, side, dtype, count)
            else:
                own |= side(args.cache, Load(dtype, count))
                own["others"] = Moment.now().cores_since(start)[1]
        file.write_text(json.dumps(results, indent=1))
    print(table(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
