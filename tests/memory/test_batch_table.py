"""The batch table's numbers against a direct count."""

import re

from mindrlhf.configs.loading import load_grpo_config
from mindrlhf.memory.batch_table import batch_table


def numbers(table: str) -> dict[str, list[int]]:
    """Name of a row (the second `prompts` is `each prompts`) -> its one or two numbers."""
    rows = {}
    for line in table.splitlines()[1:]:
        name, rest = re.match(r"( *[a-z][a-z-]*(?: [a-z]+)?) +(.*)", line).groups()
        rows[name.replace("  ", "each ")] = [int(word) for word in rest.split() if word.isdigit()][:2]
    return rows


def test_every_number_of_a_step():
    overrides = (
        "data.prompts_per_step=32 rollout.num_generations=8 algorithm.num_iterations=3 rollout.max_new_tokens=100 "
        "algorithm.updates_per_iteration=4 train.max_tokens_per_micro_batch=2000 train.length_bucket=16"
    )
    config = load_grpo_config(overrides=overrides.split())
    rows = numbers(batch_table(config, train_ranks=2, infer_ranks=4, longest_prompt=50))
    assert rows["prompts"] == [32, 8]
    assert rows["responses"] == [256, 64]
    assert rows["updates"][0] == 12
    assert rows["each prompts"] == [8, 4]
    assert rows["each responses"] == [64, 32]
    # A group is 64 padded prompt tokens and 8 x 112 of responses: two of them in 2,000, so two micro-batches for four.
    assert rows["each micro-batches"] == [4, 2]


def test_rounds_of_dynamic_sampling_are_told():
    config = load_grpo_config("preset:dapo", ["dynamic_sampling.prompts_per_round=12"])
    table = batch_table(config, train_ranks=1, infer_ranks=1, longest_prompt=10)
    assert "12 to 120 prompts drawn: dynamic_sampling.max_rounds 10" in table
