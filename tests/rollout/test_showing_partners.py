"""Conversations whose partner shows pictures: an oracle's tokens, any number of slots, log-probs of training."""

from functools import cache

import numpy as np
import pytest
import reference_tower
from reference_sampling import filtered
from showing_partner import IMAGE, ShowingPartner, shown_answer, shown_first
from small_model import SmallModel
from small_tower import small_tower

from mindrlhf.backend.operators import COMPOSED
from mindrlhf.configs.grpo import SamplingSettings, TrainSettings
from mindrlhf.images.processor import ImageProcessor
from mindrlhf.random_numbers import uniform
from mindrlhf.rollout.engine import Engine
from mindrlhf.rollout.partner import Reply
from mindrlhf.rollout.shown import fitted
from mindrlhf.training.batch import SequenceGroup
from mindrlhf.training.graphs import PolicyLogProbs
from mindrlhf.training.scoring import Scorer
from mindrlhf.types import Prompt

SEED, STEP, LIMIT, BUCKET, SAMPLES = 11, 3, 52, 64, 2
ENDS = tuple(range(0, 40, 4))
LONGEST = 12  # tokens of a prompt
VISION = small_tower(
    max_pixels=256, image_token_id=IMAGE, video_token_id=61, vision_start_token_id=62, vision_end_token_id=63
)
HOW = {"drawn": {"temperature": 1.5}, "greedy": {"temperature": 0.0}, "penalised": {"repetition_penalty": 1.3}}


@cache
def small() -> SmallModel:
    return SmallModel.random(1, family="qwen2_5_vl", vision=VISION, num_layers=1)  # each is compiled for seconds


@pytest.fixture(scope="module")
def pictures():
    rng = np.random.default_rng(5)
    shapes = ((16, 16, 3), (16, 8, 3), (8, 16, 3))
    return [
        ImageProcessor(VISION.images).picture(rng.integers(0, 256, shape, dtype=np.uint8), "here") for shape in shapes
    ]


@pytest.fixture(scope="module")
def prompts(pictures):
    """Text alone, and an image."""
    rng = np.random.default_rng(6)
    text = rng.integers(2, 40, 7).tolist()
    shown = [*text[:2], *[IMAGE] * pictures[1].tokens, *text[4:]]
    return [Prompt(100, np.array(text, np.int32)), Prompt(107, np.array(shown, np.int32), pictures=(pictures[1],))]


@cache
def opened(how="drawn", slots=2, operators=None):
    """(engine, decoder), with a shape for each graph: one length, and few numbers of pictures."""
    decoder = small().build(operators=operators)[0]
    sampling = SamplingSettings(max_new_tokens=LIMIT, **HOW[how])
    return Engine(small().config, decoder, sampling, slots, LONGEST, ENDS, SEED, BUCKET, shows=True), decoder


@pytest.fixture(scope="module")
def conversed(prompts, pictures):
    """How -> groups of two slots whose replies come in a mixed order, made when they are asked for."""

    def of(how="drawn", slots=2, order=3, operators=None):
        engine, _ = opened(how, slots, operators)
        return engine.generate(prompts, SAMPLES, STEP, partner=ShowingPartner(pictures, order))

    return cache(of)


def simulated(prompt, sample, pictures, how):
    """(ids, drawn, policy log-probs of drawn ones, pictures by place, reason), one token at a time in float64."""
    model = small()
    tensors = model.merged(model.arrays)
    numbers = uniform(SEED, STEP, prompt.id, sample, np.arange(LIMIT))
    ids, own = shown_first(prompt.id, sample, pictures)
    places = [place for place, token in enumerate(ids) if token == IMAGE][:1]
    shown = dict(zip(places, own, strict=True))
    drawn, log_probs, first = [False] * len(ids), [0.0] * len(ids), len(ids)
    while len(ids) < LIMIT:
        whole = np.concatenate([prompt.token_ids, np.array(ids, np.int32)])
        seen = [(one.patches(), one.grid) for one in (*prompt.pictures, *(shown[place] for place in sorted(shown)))]
        row = reference_tower.logits(model.config, tensors, whole, seen)[-1]
        row[list(VISION.vision_tokens)] = -np.inf
        settings = {"temperature": 1.0, **HOW[how]}
        token = int(np.argmax(np.cumsum(filtered(row, **settings, seen=set(whole.tolist()))) > numbers[len(ids)]))
        policy = filtered(row, temperature=settings["temperature"] or 1.0)
        ids, drawn, log_probs = [*ids, token], [*drawn, True], [*log_probs, np.log(policy[token])]
        if token in ENDS:
            more, own, over = shown_answer(ids[first:], len(ids), pictures)
            begin = len(ids)
            kept, fitting = cut(more, own, LIMIT - begin)
            shown |= {begin + place: picture for place, picture in fitting.items()}
            ids, drawn, log_probs = [*ids, *kept], [*drawn, *[False] * len(kept)], [*log_probs, *[0.0] * len(kept)]
            first = len(ids)
            if len(kept) < len(more):
                return ids, drawn, log_probs, shown, "length"
            if over:
                return ids, drawn, log_probs, shown, "eos"
    return ids, drawn, log_probs, shown, "length"


def cut(ids, pictures, room):
    """(ids up to the room, before an image that does not fit, and pictures by place), image by image."""
    places, at = {}, 0
    for picture in pictures:
        at = ids.index(IMAGE, at)
        if at + picture.tokens > room:
            return ids[: min(at, room)], places
        places[at] = picture
        at += picture.tokens
    return ids[:room], places


@pytest.mark.parametrize(
    "how", ["drawn", *(pytest.param(how, marks=pytest.mark.slow) for how in ("greedy", "penalised"))]
)
def test_conversations_are_the_oracle_s(conversed, pictures, how):
    behind = 0
    for group in conversed(how):
        for rollout in group.rollouts:
            ids, drawn, log_probs, shown, reason = simulated(group.prompt, rollout.sample_index, pictures, how)
            assert rollout.response_ids.tolist() == ids
            assert rollout.sampled.tolist() == drawn
            assert rollout.finish_reason == reason
            assert rollout.pictures == shown
            np.testing.assert_allclose(rollout.row("policy_log_probs"), log_probs, rtol=0, atol=1e-4)
            assert not np.isin(rollout.response_ids[rollout.sampled], VISION.vision_tokens).any()
            behind += sum(rollout.sampled[max(shown, default=LIMIT) :])
    assert behind >= 5


@pytest.mark.slow
@pytest.mark.parametrize(("slots", "order"), [(1, None), (2, 4), (3, 4), (4, None), (4, 5)])
def test_tokens_depend_neither_on_slots_nor_on_times(conversed, slots, order):
    for ours, theirs in zip(conversed("drawn", slots, order), conversed("drawn"), strict=True):
        for one, other in zip(ours.rollouts, theirs.rollouts, strict=True):
            np.testing.assert_array_equal(one.response_ids, other.response_ids)
            np.testing.assert_array_equal(one.row("policy_log_probs"), other.row("policy_log_probs"))
            assert one.pictures == other.pictures


def test_log_probs_are_those_of_the_train_graph(conversed):
    groups = conversed("drawn")
    _, decoder = opened("drawn")
    scorer = Scorer(PolicyLogProbs(decoder, HOW["drawn"]["temperature"]), TrainSettings(length_bucket=BUCKET))
    sequences = [
        SequenceGroup(
            group.prompt.token_ids,
            tuple(rollout.response_ids for rollout in group.rollouts),
            tuple(rollout.sampled for rollout in group.rollouts),
            pictures=(group.prompt.pictures, *(tuple(rollout.pictures.values()) for rollout in group.rollouts)),
        )
        for group in groups
    ]
    for rows, group in zip(scorer(sequences), groups, strict=True):
        for row, rollout in zip(rows, group.rollouts, strict=True):
            drawn = rollout.sampled
            np.testing.assert_allclose(rollout.row("policy_log_probs")[drawn], row[drawn], rtol=0, atol=2e-5)


@pytest.mark.slow
def test_composed_layers_give_the_same_tokens(conversed):
    for ours, theirs in zip(conversed("drawn", operators=COMPOSED), conversed("drawn"), strict=True):
        for one, other in zip(ours.rollouts, theirs.rollouts, strict=True):
            np.testing.assert_array_equal(one.response_ids, other.response_ids)
            np.testing.assert_allclose(one.row("policy_log_probs"), other.row("policy_log_probs"), rtol=0, atol=1e-4)


def test_an_image_is_never_cut(pictures):
    first, second, _ = pictures
    ids = np.array([7, *[IMAGE] * first.tokens, 8, *[IMAGE] * second.tokens, 9], np.int32)
    both = 1 + first.tokens, 2 + first.tokens
    for room in range(len(ids) + 1):
        kept, shown = fitted(ids, [first, second], room, VISION)
        expected = room
        if room < both[0]:
            expected = min(room, 1)
        elif room < both[1] + second.tokens:
            expected = min(room, both[1])
        assert len(kept) == expected
        assert (kept == IMAGE).sum() == sum(one.tokens for one in shown.values())


@pytest.mark.parametrize(
    ("ids", "shown", "said"),
    [
        ([7, IMAGE], 1, "image tokens were given for images of"),
        ([7, *[IMAGE] * 2, 8], 0, "image tokens were given for images of"),
    ],
)
def test_tokens_that_are_not_those_of_the_pictures_are_named(pictures, ids, shown, said):
    with pytest.raises(ValueError, match=said):
        fitted(np.array(ids, np.int32), [pictures[shown]], 40, VISION)


def test_a_model_of_text_takes_no_pictures(pictures):
    with pytest.raises(ValueError, match="takes text alone"):
        fitted(np.array([7, 8], np.int32), pictures[:1], 40, None)


def test_an_opening_without_room_is_cut_before_its_image(prompts, pictures):
    """One token is drawn, and the conversation ends."""

    class Opening(ShowingPartner):
        def begin(self, prompts, num_generations, step):
            ids = np.array([7] * (LIMIT - 3) + [IMAGE] * pictures[0].tokens + [9], np.int32)
            self.heard = {row: [] for row in range(num_generations)}
            return prompts, [Reply(row, ids, pictures=(pictures[0],)) for row in self.heard]

    engine, _ = opened("drawn")
    (group,) = engine.generate(prompts[:1], SAMPLES, STEP, partner=Opening(pictures))
    for rollout in group.rollouts:
        assert rollout.sampled.tolist() == [*[False] * (LIMIT - 3), True]
        assert rollout.pictures == {}
