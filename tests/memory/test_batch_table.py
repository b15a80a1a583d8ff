"""The batch table's numbers against a direct count."""

import re

from mindrlhf.configs.loading import load_grpo_config
from mindrlhf.configs.model import ModelConfig
from mindrlhf.configs.model_yaml import ModelYaml
from mindrlhf.flags import TrainFlags
from mindrlhf.memory.batch_table import batch_table
from mindrlhf.memory.pictures import Lengths
from mindrlhf.memory.work import Work
from mindrlhf.trainer.check import read_roles

MODEL = ModelConfig(
    vocab_size=96, hidden_size=32, intermediate_size=64, num_layers=4, num_heads=8, num_kv_heads=4, head_dim=4
)


def table(config, train_ranks: int, infer_ranks: int, longest_prompt: int) -> str:
    train, infer = (
        ModelYaml(path="model.yaml", parallel={"data_parallel": ranks}, context={"device_target": "CPU"})
        for ranks in (train_ranks, infer_ranks)
    )
    roles = read_roles(TrainFlags(), config, MODEL)
    return batch_table(Work.of(config, roles, {"train": train, "infer": infer}, Lengths(longest_prompt)))


def numbers(text: str) -> dict[str, list[int]]:
    """Name of a row (the second `prompts` is `each prompts`) -> its one or two numbers."""
    rows = {}
    for line in text.splitlines()[1:]:
        name, rest = re.match(r"( *[a-z][a-z-]*(?: [a-z]+)?) +(.*)", line).groups()
        rows[name.replace("  ", "each ")] = [int(word) for word in rest.split() if word.isdigit()][:2]
    return rows


def test_every_number_of_a_step():
    overrides = (
        "data.prompts_per_step=32 rollout.num_generations=8 algorithm.num_iterations=3 rollout.max_new_tokens=100 "
        "algorithm.updates_per_iteration=4 train.max_tokens_per_micro_batch=2000 train.length_bucket=16"
    )
    config = load_grpo_config(overrides=overrides.split())
    rows = numbers(table(config, train_ranks=2, infer_ranks=4, longest_prompt=50))
    assert rows["prompts"] == [32, 8]
    assert rows["responses"] == [256, 64]
    assert rows["updates"][0] == 12
    assert rows["each prompts"] == [8, 4]
    assert rows["each responses"] == [64, 32]
    # A group is 64 padded prompt tokens and 8 x 112 of responses: two of them in 2,000, so two micro-batches for four.
    assert rows["each micro-batches"] == [4, 2]


def test_rounds_of_dynamic_sampling_are_told():
    config = load_grpo_config("preset:dapo", ["dynamic_sampling.prompts_per_round=12"])
    shown = table(config, train_ranks=1, infer_ranks=1, longest_prompt=10)
    assert "12 to 120 prompts drawn: dynamic_sampling.max_rounds 10" in shown
