"""Greedy tokens of models with experts: the stored ones, or an oracle's with adapters, in any number of slots."""

from dataclasses import replace

import numpy as np
import pytest
from small_model import Golden, random_arrays

from mindrlhf.backend.operators import COMPOSED
from mindrlhf.configs.grpo import SamplingSettings
from mindrlhf.configs.lora import Adapter
from mindrlhf.rollout.engine import Engine
from mindrlhf.types import Prompt

NAMES = ("qwen3_moe_tiny", "qwen3_moe_dense_first_tiny")
SLOTS = {"fused": (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 24, 31, 32, 33, 48, 63, 64), "composed": (1, 3, 16, 64)}
NEW = 12


def with_adapters(golden: Golden) -> Golden:
    """The model with adapters on every map but routers, large enough to change its answers."""
    config = golden.config.model_copy(update={"adapter": Adapter(4, 8)})
    return replace(golden, config=config, arrays=random_arrays(config, 5) | golden.arrays)


def greedy(golden: Golden, ids: np.ndarray) -> list[int]:
    """The oracle's most probable tokens."""
    found = ids.tolist()
    for _ in range(NEW):
        found.append(int(golden.logits(found)[-1].argmax()))
    return found[len(ids) :]


@pytest.fixture(scope="module", params=NAMES)
def golden(request, shared) -> Golden:
    return Golden.load(shared / "golden" / request.param)


@pytest.mark.slow
@pytest.mark.parametrize("adapted", [False, True], ids=["plain", "adapters"])
@pytest.mark.parametrize("form", SLOTS)
def test_greedy_tokens_are_the_same_in_any_number_of_slots(golden, form, adapted):
    stored = [row[:NEW].tolist() for row in golden.greedy]
    subject = with_adapters(golden) if adapted else golden
    expected = [greedy(subject, ids) for ids in subject.sequences]
    assert (expected == stored) is not adapted
    decoder, _ = subject.build(operators=COMPOSED if form == "composed" else None)
    sampling = SamplingSettings(max_new_tokens=NEW, temperature=0.0)
    prompts = [Prompt(i, ids) for i, ids in enumerate(subject.sequences)]
    for slots in SLOTS[form]:
        engine = Engine(subject.config, decoder, sampling, slots, 19, (), 0)
        for group in engine.generate(prompts, -(-slots // len(prompts)) + 1, 1):
            for rollout in group.rollouts:
                assert rollout.response_ids.tolist() == expected[group.prompt.id], slots
