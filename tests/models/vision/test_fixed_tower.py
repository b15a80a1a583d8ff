"""A tower that nothing changes: an image's rows are the stored ones, computed once, and kept within a limit."""

import copy
from dataclasses import replace

import mindspore
import numpy as np
import pytest
from seeing_model import Seeing
from small_updater import RATE, Subject

from mindrlhf.backend.cpu import CPU
from mindrlhf.configs.grpo import SamplingSettings, TrainSettings
from mindrlhf.configs.lora import Adapter
from mindrlhf.images.processor import ImageProcessor
from mindrlhf.models.initialize import build_parameters
from mindrlhf.models.vision.batch import RowInputs
from mindrlhf.models.vision.fixed_tower import FixedTower, KnownRows, open_known_rows
from mindrlhf.models.vision.rows import TOWER, is_tower
from mindrlhf.rollout.engine import Engine
from mindrlhf.training.graphs import PolicyLogProbs
from mindrlhf.training.objective import NEGATIVE_LOG_LIKELIHOOD
from mindrlhf.training.scoring import Scorer
from mindrlhf.types import Prompt

ROOM = 1 << 30

mindspore.set_context(mode=mindspore.GRAPH_MODE, device_target="CPU")


def tower_of(seeing, known, dtype="float32") -> FixedTower:
    parameters = build_parameters(seeing.specs, lambda spec: seeing.arrays[spec.name])
    return FixedTower(seeing.config, parameters, CPU.operators(), dtype, known)


@pytest.fixture(scope="module")
def tower(seeing):
    return tower_of(seeing, KnownRows(ROOM))


def knowing(tower, known) -> FixedTower:
    """The tower, compiled as it is, with other known rows."""
    other = copy.copy(tower)
    other._known = known
    return other


class ShownBy:
    """Inputs of a decoder whose rows come from a tower that can be changed; its graphs are compiled once."""

    def __init__(self, seeing):
        self.tower = None
        self.inputs = RowInputs(seeing.config.vision, seeing.config.hidden_size, lambda one: self.tower.rows_of(one))


@pytest.fixture(scope="module")
def frozen(seeing) -> Seeing:
    return replace(seeing, config=seeing.config.model_copy(update={"frozen": ("vision", "merger")}))


@pytest.fixture(scope="module")
def mirrored(seeing):
    """The last image mirrored: its ids in a prompt are the same."""
    return ImageProcessor(seeing.pictures[4].settings).picture(seeing.stored["image_4"][:, ::-1], "here")


def test_rows_are_the_stored_ones_whatever_was_computed_before(seeing, tower):
    found = [tower.rows_of(picture) for picture in seeing.pictures]
    np.testing.assert_allclose(np.concatenate(found), seeing.stored["image_embeds"], rtol=0, atol=1e-5)
    other = knowing(tower, KnownRows(0))
    for rows, picture in zip(reversed(found), reversed(seeing.pictures), strict=True):
        np.testing.assert_array_equal(other.rows_of(picture), rows)


def test_an_image_is_computed_once_and_one_that_looks_otherwise_too(seeing, tower, mirrored):
    known = KnownRows(ROOM)
    tower = knowing(tower, known)
    picture = seeing.pictures[4]
    again = ImageProcessor(picture.settings).picture(seeing.stored["image_4"], "elsewhere")
    one, same, other = (tower.rows_of(shown) for shown in (picture, again, mirrored))
    assert same is one
    assert other.shape == one.shape
    assert np.abs(other - one).max() > 0.1
    assert known.collect() == (1, [picture, mirrored])
    assert known.collect() == (0, [])


def test_the_least_recently_used_rows_go_first(seeing, tower):
    pictures = seeing.pictures[:3]
    sizes = [4 * picture.tokens * seeing.config.hidden_size for picture in pictures]
    known = KnownRows(sizes[0] + max(sizes[1:]))
    tower = knowing(tower, known)
    first = tower.rows_of(pictures[0])
    for shown in (1, 0, 2, 0):  # the second image has to make room for the third one
        tower.rows_of(pictures[shown])
        assert known.nbytes <= sizes[0] + max(sizes[1:])
    assert known.collect() == (2, pictures)
    assert known.nbytes == sizes[0] + sizes[2]
    np.testing.assert_array_equal(tower.rows_of(pictures[0]), first)
    tower.rows_of(pictures[1])
    assert known.collect() == (1, [pictures[1]])


def test_an_image_above_the_limit_leaves_the_others(seeing, tower):
    small, large = sorted(seeing.pictures, key=lambda picture: picture.tokens)[:: len(seeing.pictures) - 1]
    known = KnownRows(4 * small.tokens * seeing.config.hidden_size)
    tower = knowing(tower, known)
    for shown in (small, large, large, small):
        tower.rows_of(shown)
    assert known.collect() == (1, [small, large, large])


def test_equal_towers_share_rows_and_others_do_not(seeing, tower):
    """The text's weights have no part in it; one bias of the tower has, and so has the dtype of products."""
    known = KnownRows(ROOM)
    picture = seeing.pictures[0]
    bias, norm = f"{TOWER}merger.mlp.2.bias", "model.norm_out.weight"
    changed = {name: replace(seeing, arrays=seeing.arrays | {name: seeing.arrays[name] + 1}) for name in (bias, norm)}
    rows = knowing(tower, known).rows_of(picture)
    assert tower_of(changed[norm], known).rows_of(picture) is rows
    np.testing.assert_allclose(tower_of(changed[bias], known).rows_of(picture), rows + 1, rtol=0, atol=1e-5)
    tower_of(seeing, known, "bfloat16").rows_of(picture)
    assert known.collect() == (1, [picture] * 3)


@pytest.mark.parametrize(
    ("changes", "is_open"),
    [
        ({"frozen": ("vision", "merger")}, True),
        ({"adapter": Adapter(2, 4.0)}, True),
        ({}, False),
        ({"frozen": ("vision",)}, False),
        ({"frozen": ("merger", "text")}, False),
        ({"adapter": Adapter(2, 4.0, target_modules=("merger.mlp.0", "q_proj"))}, False),
        ({"family": "qwen2", "vision": None}, False),
    ],
)
def test_rows_are_known_only_where_tower_and_merger_stay(seeing, changes, is_open):
    assert (open_known_rows(seeing.config.model_copy(update=changes), 1.0) is not None) == is_open


@pytest.fixture(scope="module")
def known_and_not(frozen, tower):
    """The same update, scores and gradients with rows that are known, and with a tower that computes them each time."""
    found, shown = [], ShownBy(frozen)
    subject = Subject(frozen, NEGATIVE_LOG_LIKELIHOOD, image_rows=shown.inputs)
    scorer = Scorer(PolicyLogProbs(subject.decoder, 1.0), TrainSettings(length_bucket=4))
    for limit in (ROOM, 0):
        known = KnownRows(limit)
        shown.tower = knowing(tower, known)
        for picture in frozen.pictures:
            shown.tower.rows_of(picture)
        known.collect()
        update = subject.updater(frozen.groups, RATE, weights=frozen.weights)
        found.append((update, scorer(frozen.groups), dict(subject.gradients)))
        assert (known.collect()[0] > 0) == bool(limit)
    return found


@pytest.mark.slow
def test_known_rows_change_no_bit_of_scores_and_updates(frozen, known_and_not):
    """And they are the stored ones."""
    (update, scores, gradients), (other, other_scores, other_gradients) = known_and_not
    frozen.check_log_probs(update.outputs)
    assert gradients.keys() == {spec.name for spec in frozen.specs if not is_tower(spec)}
    frozen.check_norms(gradients)
    assert update.loss == other.loss
    for ours, theirs in ((update.outputs, other.outputs), (scores, other_scores)):
        assert all(np.array_equal(one, two) for (one,), (two,) in zip(ours, theirs, strict=True))
    assert all(np.array_equal(gradients[name], other_gradients[name]) for name in other_gradients)


@pytest.mark.slow
def test_updates_are_those_of_a_tower_in_the_graph(frozen, known_and_not):
    update, _, gradients = known_and_not[0]
    subject = Subject(frozen, NEGATIVE_LOG_LIKELIHOOD)
    plain = subject.updater(frozen.groups, RATE, weights=frozen.weights)
    np.testing.assert_allclose(update.loss, plain.loss, rtol=1e-6)
    for name, expected in subject.gradients.items():
        np.testing.assert_allclose(gradients[name], expected, rtol=0, atol=1e-5 * np.abs(expected).max(), err_msg=name)


@pytest.mark.slow
def test_known_rows_change_no_bit_of_answers(frozen, tower, mirrored):
    """Two prompts have the same ids; an engine of two slots prefills the prompts one after the other."""
    shown = [(ids, tuple(pictures)) for ids, pictures in frozen.sequences]
    shown.append((shown[1][0], (mirrored,)))
    prompts = [Prompt(number, ids, pictures=own) for number, (ids, own) in enumerate(shown)]
    answers, shown_by = [], ShownBy(frozen)
    decoder, _ = frozen.build(image_rows=shown_by.inputs)
    engine = Engine(frozen.config, decoder, SamplingSettings(max_new_tokens=6), 2, 39, (0, 1), 0, 8)
    for limit in (ROOM, 0):
        known = KnownRows(limit)
        shown_by.tower = knowing(tower, known)
        groups = [*engine.generate(prompts, 2, 1), *engine.generate(prompts, 2, 1)]
        answers.append([rollout for group in groups for rollout in group.rollouts])
        pictures = sum(len(prompt.pictures) for prompt in prompts)
        assert (known.collect()[0] >= pictures) == bool(limit)
    for one, two in zip(*answers, strict=True):
        np.testing.assert_array_equal(one.response_ids, two.response_ids)
        np.testing.assert_array_equal(one.row("policy_log_probs"), two.row("policy_log_probs"))
    size = len(answers[0]) // 2
    ours, theirs = (answers[0][place].row("policy_log_probs")[0] for place in (2, size - 2))
    assert ours != theirs
