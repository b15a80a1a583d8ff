"""Times a model with experts against a dense one of the same active parameters.

OMP_NUM_THREADS=1 python benchmarks/experts.py

Both have hidden 256, 4 layers, 4 heads of 64, 2 kv heads and 2,048 tokens. The dense one has 704 inner columns, the
other one 16 experts of 352, of which 2 compute a token. The work is that of benchmarks/grpo_step.py: 8 prompts of 64
tokens with 8 responses of 64. The models take turns. Printed are medians of processor seconds, so that other programs
of a busy machine count little; set OMP_NUM_THREADS=1, or waiting threads count too.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import mindspore
import numpy as np

from mindrlhf.backend.cpu import CPU
from mindrlhf.configs.grpo import OptimizerSettings, SamplingSettings, TrainSettings
from mindrlhf.configs.model import ModelConfig
from mindrlhf.models.decoder import Decoder
from mindrlhf.models.initialize import build_parameters, random_tensor
from mindrlhf.models.parameters import parameter_count, parameter_table
from mindrlhf.rollout.engine import Engine
from mindrlhf.training.batch import SequenceGroup
from mindrlhf.training.graphs import PolicyLogProbs
from mindrlhf.training.objective import NEGATIVE_LOG_LIKELIHOOD
from mindrlhf.training.optimizer import AdamW
from mindrlhf.training.updater import Updater
from mindrlhf.types import Prompt

PROMPTS, SAMPLES, TOKENS, VOCABULARY, INNER = 8, 8, 64, 2048, 704
SIZES = {"vocab_size": VOCABULARY, "hidden_size": 256, "num_layers": 4, "num_heads": 4, "num_kv_heads": 2}
SIZES |= {"head_dim": 64, "intermediate_size": INNER, "qk_norm": True, "attention_bias": False}
EXPERTS = {"num_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": INNER // 2, "norm_topk_prob": True}
MODELS = {"dense": {"family": "qwen3"}, "experts": {"family": "qwen3_moe", **EXPERTS}}


def prepare(config: ModelConfig, groups: list[SequenceGroup]) -> dict[str, Callable[[int], object]]:
    """Build a model's update and generation, each a function of the round."""
    table = parameter_table(config)
    parameters = build_parameters(table, lambda spec: random_tensor(spec, config, 0))
    decoder = Decoder(config, parameters, CPU.operators(), 2 * TOKENS)
    optimizer = AdamW(OptimizerSettings(), [parameters[spec.name] for spec in table], table)
    head = PolicyLogProbs(decoder, 1.0)
    updater = Updater(head, NEGATIVE_LOG_LIKELIHOOD, optimizer, TrainSettings())
    weights = [tuple(np.full(TOKENS, 1e-4, np.float32) for _ in group.responses) for group in groups]
    sampling = SamplingSettings(max_new_tokens=TOKENS)
    engine = Engine(config, decoder, sampling, PROMPTS * SAMPLES, TOKENS, (), 0)
    prompts = [Prompt(number, group.prompt_ids) for number, group in enumerate(groups)]
    return {
        "update": lambda number: updater(groups, 1e-6, weights=weights),
        "generation": lambda number: engine.generate(prompts, SAMPLES, number),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    mindspore.set_context(mode=mindspore.GRAPH_MODE, device_target="CPU")
    rng = np.random.default_rng(0)
    ids = rng.integers(0, VOCABULARY, (PROMPTS, 1 + SAMPLES, TOKENS)).astype(np.int32)
    groups = [SequenceGroup(prompt, tuple(responses)) for prompt, *responses in ids]
    configs = {name: ModelConfig(**SIZES | changes) for name, changes in MODELS.items()}
    works = {name: prepare(config, groups) for name, config in configs.items()}
    seconds: dict[tuple[str, str], list[float]] = {(name, part): [] for name in works for part in works[name]}
    for number in range(rounds + 1):  # graphs are built in the first round
        for name, part in seconds:
            start = time.process_time()
            works[name][part](number)
            if number:
                seconds[name, part].append(time.process_time() - start)
    for name, config in configs.items():
        print(f"{name}: {parameter_count(config):,} parameters")
    for part in works["dense"]:
        dense, experts = (statistics.median(seconds[name, part]) for name in configs)
        print(f"{part}: dense {dense:.2f} s, experts {experts:.2f} s of processor time, ratio {experts / dense:.2f}")


if __name__ == "__main__":
    main()
