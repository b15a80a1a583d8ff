"""Generation of a model that sees: an oracle's and stored tokens, log-probs of training, and banned tokens."""

from dataclasses import replace

import numpy as np
import pytest
import reference_tower
from reference_sampling import respond
from seeing_model import Seeing
from small_model import SmallModel
from small_tower import small_tower

from mindrlhf.backend.operators import COMPOSED
from mindrlhf.configs.grpo import SamplingSettings, TrainSettings
from mindrlhf.images.processor import ImageProcessor
from mindrlhf.random_numbers import uniform
from mindrlhf.rollout.engine import Engine
from mindrlhf.training.batch import SequenceGroup
from mindrlhf.training.graphs import PolicyLogProbs
from mindrlhf.training.scoring import Scorer
from mindrlhf.types import Prompt

SEED, STEP, NEW, BUCKET, TEMPERATURE, SAMPLES = 11, 3, 12, 8, 0.7, 3
ENDS = (0, 1)
VISION = small_tower(image_token_id=60, video_token_id=61, vision_start_token_id=62, vision_end_token_id=63)


def engine_of(model, decoder, slots, longest, **settings) -> Engine:
    sampling = SamplingSettings(max_new_tokens=NEW, **settings)
    return Engine(model.config, decoder, sampling, slots, longest, ENDS, SEED, BUCKET)


@pytest.fixture(scope="module")
def small() -> SmallModel:
    """Two layers and one block of a tower."""
    return SmallModel.random(1, family="qwen2_5_vl", vision=VISION)


@pytest.fixture(scope="module")
def shown() -> list[Prompt]:
    """Text alone; an image, and its mirror image behind the same ids; two images with text between."""
    rng = np.random.default_rng(5)
    wide, high = (rng.integers(0, 256, shape, dtype=np.uint8) for shape in ((16, 32, 3), (24, 8, 3)))
    read = ImageProcessor(VISION.images).picture
    one, mirrored, other = (read(pixels, "here") for pixels in (wide, wide[:, ::-1], high))
    text = [rng.integers(2, 60, count).tolist() for count in (9, 3, 4, 1, 2, 5)]
    pad = [60]
    alone = [*text[1], *pad * one.tokens, *text[2]]
    both = [*text[3], *pad * other.tokens, *text[4], *pad * one.tokens, *text[5]]
    rows = [(text[0], ()), (alone, (one,)), (alone, (mirrored,)), (both, (other, one))]
    return [Prompt(100 + 7 * i, np.array(ids, np.int32), pictures=own) for i, (ids, own) in enumerate(rows)]


@pytest.fixture(scope="module")
def answers(small, shown):
    engine = engine_of(small, small.build()[0], 4, max(len(prompt.token_ids) for prompt in shown), temperature=1.5)
    return engine.generate(shown, SAMPLES, STEP)


def simulated(model, prompt, sample):
    """(tokens, their log-probs) of one response in float64, without images' tokens."""
    pictures = [(picture.patches(), picture.grid) for picture in prompt.pictures]

    def next_logits(ids):
        logits = reference_tower.logits(model.config, model.merged(model.arrays), np.array(ids), pictures)[-1]
        logits[list(model.config.vision.vision_tokens)] = -np.inf
        return logits

    numbers = uniform(SEED, STEP, prompt.id, sample, np.arange(NEW))
    return respond(next_logits, prompt.token_ids, numbers, stop_ids=ENDS, temperature=1.5)


def test_responses_are_the_oracle_s(small, answers):
    """They show that tokens behind images have their angles, and that no image's token is drawn."""
    for group in answers:
        for rollout in group.rollouts[:: SAMPLES - 1]:
            ids, log_probs, *_ = simulated(small, group.prompt, rollout.sample_index)
            assert rollout.response_ids.tolist() == list(ids)
            np.testing.assert_allclose(rollout.row("policy_log_probs"), log_probs, rtol=0, atol=1e-4)


def test_the_same_ids_with_another_image_have_another_answer(shown, answers):
    np.testing.assert_array_equal(shown[1].token_ids, shown[2].token_ids)
    (_, one, other, _) = (group.rollouts[0].row("policy_log_probs") for group in answers)
    assert one[0] != other[0]


@pytest.fixture(scope="module")
def seeing(shared) -> Seeing:
    return Seeing.load(shared / "golden" / "qwen2_5_vl_tiny")


@pytest.fixture(scope="module")
def stored(seeing) -> list[Prompt]:
    """The stored sequences, and the second one's ids with its image mirrored."""
    every = [(ids, tuple(pictures)) for ids, pictures in seeing.sequences]
    mirrored = ImageProcessor(seeing.pictures[4].settings).picture(seeing.stored["image_4"][:, ::-1], "here")
    assert every[1][1] == (seeing.pictures[4],)
    return [Prompt(i, ids, pictures=own) for i, (ids, own) in enumerate([*every, (every[1][0], (mirrored,))])]


def built(model, form):
    return model.build(operators=COMPOSED if form == "composed" else None)[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "slots"), [*(("fused", slots) for slots in (1, 2, 3, 4, 7, 16, 64)), ("composed", 3), ("composed", 64)]
)
def test_greedy_tokens_are_the_stored_ones(seeing, stored, form, slots):
    engine = engine_of(seeing, built(seeing, form), slots, 39, temperature=0.0, min_new_tokens=NEW)
    found = [group.rollouts[0].response_ids.tolist() for group in engine.generate(stored, 1, STEP)]
    assert found == [*seeing.stored["greedy"].tolist(), seeing.stored["other_image_greedy"].reshape(-1).tolist()]


@pytest.mark.slow
@pytest.mark.parametrize("form", ["fused", "composed"])
def test_log_probs_of_drawn_tokens_are_the_train_graph_s(seeing, stored, form):
    """With large logits of images' tokens, which would be drawn if they could."""
    name = "model.tok_embeddings.embedding_weight"
    embedding = seeing.arrays[name].copy()
    embedding[list(seeing.config.vision.vision_tokens)] *= 4
    eager = replace(seeing, arrays=seeing.arrays | {name: embedding})
    decoder = built(eager, form)
    groups = engine_of(eager, decoder, 15, 39, temperature=TEMPERATURE).generate(stored, SAMPLES, STEP)
    sequences = [
        SequenceGroup(
            group.prompt.token_ids,
            tuple(rollout.response_ids for rollout in group.rollouts),
            pictures=(group.prompt.pictures, *((),) * SAMPLES),
        )
        for group in groups
    ]
    scorer = Scorer(PolicyLogProbs(decoder, TEMPERATURE), TrainSettings(length_bucket=BUCKET))
    for rows, group in zip(scorer(sequences), groups, strict=True):
        for row, rollout in zip(rows, group.rollouts, strict=True):
            assert not np.isin(rollout.response_ids, seeing.config.vision.vision_tokens).any()
            for one in ("behaviour_log_probs", "policy_log_probs"):
                np.testing.assert_allclose(rollout.row(one), row, rtol=0, atol=2e-5)
