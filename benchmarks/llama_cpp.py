"""Generation alongside llama.cpp: the same random weights of Qwen2.5-0.5B's shape, numbers and processor.

    python benchmarks/llama_cpp.py CACHE
    python benchmarks/llama_cpp.py CACHE --dtype int8 --sequences 8
    python benchmarks/llama_cpp.py CACHE --shape experts --sequences 64

CACHE is a folder outside of the project. The first call builds llama.cpp there, from the source package of
`llama-cpp-python`, with its own options for this processor, and writes the models as GGUF files (3.6 GB). Each call
measures both sides one after the other and joins its figures to those of earlier calls in CACHE/results.json. With
`--shape experts` the model has 12 layers of 16 experts, of which 2 compute a token (786 million parameters). Column
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
GOALS = {"dense": {8: 1.0, 64: 1.5}, "experts": {8: 1.0, 64: 1.0}}  # by shape: our tokens per second over theirs
# Qwen2.5-0.5B; and the same width, with experts of a quarter of its inner columns.
SIZES = {"vocab_size": 151936, "hidden_size": 896, "intermediate_size": 4864, "num_heads": 14, "num_kv_heads": 2}
SIZES |= {"head_dim": 64, "rope_theta": 1e6, "tie_word_embeddings": True, "max_position_embeddings": 32768}
EXPERTS = {"num_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 1216, "norm_topk_prob": True}
SHAPES = {
    "dense": {"family": "qwen2", "attention_bias": True, "num_layers": 24},
    "experts": {"family": "qwen3_moe", "attention_bias": False, "qk_norm": True, "num_layers": 12, **EXPERTS},
}
SHORT, LONG, SHORT_PROMPT = 4, 16, 16  # tokens of the two runs of `--processor-time`


class Load(NamedTuple):
    """Work of one run."""

    shape: str
    dtype: str
    sequences: int
    prompt: int = TOKENS
    tokens: int = TOKENS
    threads: int = THREADS


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cache", type=Path, help="folder of the build, the models and the results")
    parser.add_argument("--shape", choices=SHAPES, default=next(iter(SHAPES)), help="of the model; default: dense")
    parser.add_argument("--dtype", action="append", choices=TYPES, help="numbers of the weights; default: all")
    parser.add_argument("--sequences", action="append", type=int, help=f"at a time; default: {SEQUENCES}")
    parser.add_argument("--processor-time", action="store_true", help="measure processor time in place of rates")
    parser.add_argument("--measure-ours", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def model_of(shape: str):
    """Return the architecture of a shape."""
    from mindrlhf.configs.model import ModelConfig

    return ModelConfig(**SIZES | SHAPES[shape])


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


def model_file(cache: Path, shape: str, dtype: str) -> Path:
    """Write the random weights, or convert them; returns the file."""
    file = cache / f"{shape}-{dtype}.gguf"
    if file.exists():
        return file
    if dtype != "float32":
        convert = (build(cache) / "llama-quantize", model_file(cache, shape, "float32"), file, TYPES[dtype])
        subprocess.run(tuple(map(str, convert)), check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        return file
    from mindrlhf.checkpoint.gguf.write import FILE_TYPES, write_model
    from mindrlhf.models.initialize import random_tensor
    from mindrlhf.models.parameters import parameter_table

    model = model_of(shape)
    tensors = ((spec, random_tensor(spec, model, 0)) for spec in parameter_table(model))
    write_model(file, model, tensors, FILE_TYPES["f32"], {"tokenizer.ggml.model": "none"}, shape)
    return file


def theirs(cache: Path, load: Load) -> dict[str, float]:
    """Run llama.cpp; returns tokens per second of prompts and generation, and processor seconds."""
    positions = (load.prompt + load.tokens) * load.sequences
    sizes = {"-npp": load.prompt, "-ntg": load.tokens, "-npl": load.sequences, "-c": positions}
    threads = {"-t": load.threads, "-tb": load.threads, "-b": 2048, "-ub": 512}
    options = [str(part) for pair in (sizes | threads).items() for part in pair]
    program, model = str(build(cache) / TARGETS[0]), str(model_file(cache, load.shape, load.dtype))
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
    model = model_of(load.shape)
    tensors = {tensor.name: tensor.data for tensor in gguf.GGUFReader(model_file(cache, load.shape, "float32")).tensors}
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


def step_time(cache: Path, side: Callable[[Path, Load], dict[str, float]], load: Load) -> float:
    """Measure milliseconds of one thread for a decode step."""
    given = load._replace(prompt=SHORT_PROMPT, threads=1)
    runs = (side(cache, given._replace(tokens=tokens)) for tokens in (SHORT, LONG))
    short, long = (run["processor_s"] for run in runs)
    return 1000 * (long - short) / (LONG - SHORT)


def key(load: Load) -> str:
    """Name a load in the results."""
    return f"{load.dtype} {load.sequences}" if load.shape == "dense" else f"{load.shape} {load.dtype} {load.sequences}"


def table(results: dict[str, dict]) -> str:
    """Describe all results: tokens per second of generation with their goals, and processor time of a step."""
    head = "| weights | sequences | llama.cpp tokens/s | ours | ours / llama.cpp | goal | others |"
    lines = [f"{head} llama.cpp ms | ours | llama.cpp / ours |", "|" + " --- |" * 10]
    loads = (Load(shape, dtype, count) for shape in SHAPES for dtype in TYPES for count in SEQUENCES)
    for load in loads:
        found = results.get(key(load))
        if found:
            their, our = found["llama.cpp"], found["ours"]
            dtype, count = load.dtype, load.sequences
            kind, rates, times = dtype if dtype != "int8" else "int8, Q8_0", "- | - | -", "- | - | -"
            others = max((side["others"] for side in found.values() if "others" in side), default=0.0)
            if "generation" in our:
                their_rate, our_rate = their["generation"], our["generation"]
                rates = f"{their_rate:.0f} | {our_rate:.0f} | {our_rate / their_rate:.2f}"
            if "step_ms" in our:
                times = f"{their['step_ms']:.0f} | {our['step_ms']:.0f} | {their['step_ms'] / our['step_ms']:.2f}"
            kind = kind if load.shape == "dense" else f"{kind}, {load.shape}"
            goal = GOALS[load.shape][count]
            lines.append(f"| {kind} | {count} | {rates} | {goal:.1f} | {others:.1f} | {times} |")
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
        load = Load(args.shape, dtype, count)
        model_file(args.cache, args.shape, dtype)
        known = results.setdefault(key(load), {})
        for name, side in (("ours", ours), ("llama.cpp", theirs)):
            own, start = known.setdefault(name, {}), Moment.now()
            if args.processor_time:
                own["step_ms"] = step_time(args.cache, side, load)
            else:
                own |= side(args.cache, load)
                own["others"] = Moment.now().cores_since(start)[1]
        file.write_text(json.dumps(results, indent=1))
    print(table(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
