"""Bytes between the two sides of a split job, by hand."""

import numpy as np
import pytest
from planned_job import MODEL, work

from mindrlhf.configs.images import ImageSettings
from mindrlhf.configs.vision import VisionConfig
from mindrlhf.images.processor import Picture
from mindrlhf.memory.exchange import exchanged, experience_bytes
from mindrlhf.memory.pictures import Lengths, Pictures
from mindrlhf.models.parameters import parameter_count
from mindrlhf.reshard.plan import plan
from mindrlhf.types import Prompt
from mindrlhf.units import FLOAT32

PROMPTS, SAMPLES, PROMPT, ANSWER = 16, 4, 20, 16  # of `planned_job`
TOKEN = 4 + 1 + 4 + 4  # its id, that it was drawn, and two log-probs


def test_weights_go_to_ranks_that_generate_and_answers_to_ranks_that_train():
    job = work({"data_parallel": 2}, {"data_parallel": 4}, first_rank=2)
    answers = PROMPTS * (4 * PROMPT + SAMPLES * ANSWER * TOKEN)
    assert experience_bytes(job) == answers
    weights = parameter_count(MODEL) * FLOAT32
    assert exchanged(job, plan(*job.layouts)) == {"weights": 4 * weights, "experiences": 2 * answers}


def test_ranks_that_score_get_the_answers_and_give_values_of_each_token():
    settings = ("algorithm.advantage=gae", "algorithm.beta=0.1")
    sides = {"train": {"data_parallel": 2}, "infer": {}, "score": {"data_parallel": 2}}
    job = work(**sides, settings=settings, first_rank=2)
    found = exchanged(job, plan(*job.layouts))
    assert found["experiences"] == (2 + 2) * PROMPTS * (4 * PROMPT + SAMPLES * ANSWER * TOKEN)
    tokens = PROMPTS * SAMPLES * ANSWER
    assert found["scores"] == tokens * 4 * (2 * 2 + 2)  # log-probs and values to two ranks, returns to two ranks
    frozen = work(**sides, settings=settings[1:], first_rank=2)
    assert exchanged(frozen, plan(*frozen.layouts))["scores"] == tokens * 4 * 2


def test_colocated_ranks_exchange_nothing():
    job = work({"data_parallel": 2}, {"data_parallel": 2})
    assert exchanged(job, plan(*job.layouts)) is None


@pytest.mark.parametrize(
    ("settings", "prompts", "more"),
    [
        (["dynamic_sampling.enabled=True", "dynamic_sampling.max_rounds=3"], 3 * PROMPTS, 0),
        (["dynamic_sampling={enabled: true, max_rounds: 3, prompts_per_round: 8}"], 3 * 8, 0),
        (["rollout.environment=game.py:Game"], PROMPTS, 8),
    ],
)
def test_rounds_and_rewards_of_turns_are_counted(settings, prompts, more):
    job = work({}, {}, settings, first_rank=1)
    assert experience_bytes(job) == prompts * (4 * PROMPT + SAMPLES * ANSWER * (TOKEN + more))


@pytest.mark.parametrize(("experts", "wide"), [(8, 1), (300, 2)])
def test_a_recorded_routing_is_counted(experts, wide):
    """Two experts of each of four layers, for each token of an answer, and once of a prompt without its last."""
    of_model = {"family": "qwen3_moe", "num_experts": experts, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    job = work({}, {}, ["rollout.routing_replay=rollout"], MODEL.model_copy(update=of_model), first_rank=1)
    routing = 2 * 4 * wide
    prompt = 4 * PROMPT + (PROMPT - 1) * routing
    assert experience_bytes(job) == PROMPTS * (prompt + SAMPLES * ANSWER * (TOKEN + routing))


def test_pixels_of_pictures_are_counted():
    settings = ImageSettings()
    sizes = {"depth": 2, "hidden_size": 64, "intermediate_size": 64, "num_heads": 4, "full_attention_blocks": ()}
    vision = VisionConfig(**sizes, sections=(1, 1), images=settings)
    picture = Picture(np.zeros((56, 84, 3), np.uint8), b"", settings)
    prompts = [Prompt(0, np.zeros(PROMPT, np.int32), pictures=(picture, picture))]
    model = MODEL.model_copy(update={"family": "qwen2_5_vl", "vision": vision})
    seeing, blind = (
        work({}, {}, model=model, lengths=Lengths(PROMPT, pictures=pictures), first_rank=1)
        for pictures in (Pictures.of(prompts, vision), Pictures())
    )
    assert experience_bytes(seeing) - experience_bytes(blind) == PROMPTS * 2 * picture.pixels.nbytes
