"""Families choose the halves of each layer, and a half without an operator leaves the others fused."""

from dataclasses import replace

import engine_subject
import numpy as np
import pytest
from engine_subject import by_sample
from slow_cases import few_of
from small_model import SmallModel
from small_updater import RATE, TEMPERATURE, Subject, assert_close, clip_and_kl, random_groups, rows_like

from mindrlhf.backend.cpu import CPU
from mindrlhf.backend.native import names
from mindrlhf.models import layer
from mindrlhf.models.families import FAMILIES
from mindrlhf.models.halves import AttentionHalf, FeedForwardHalf

HALVES = ("attention", "feed_forward")
# The same arithmetic, under the names of no operators.
OWN = {
    "own_attention": AttentionHalf,
    "own_feed_forward": FeedForwardHalf,
}


@pytest.fixture
def chosen(monkeypatch):
    """Let the family choose these halves in the second layer."""

    def choose(*halves):
        qwen2 = replace(FAMILIES["qwen2"], halves=lambda model, number: halves if number == 1 else HALVES)
        monkeypatch.setattr(layer, "HALVES", {**layer.HALVES, **OWN})
        monkeypatch.setattr(layer, "FAMILIES", {"qwen2": qwen2})
        return qwen2

    return choose


MIXED = [("own_attention", "feed_forward"), ("attention", "own_feed_forward")]


def test_operators_have_the_names_of_halves():
    assert names.halves() - {"image_attention"} == set(layer.HALVES) == {*HALVES, "experts"}
    assert FAMILIES["qwen2"].all_halves(SmallModel.random().config) == set(HALVES)


@pytest.mark.parametrize("halves", MIXED)
def test_only_the_half_without_an_operator_is_composed(chosen, halves):
    if not CPU.operators().fused:
        pytest.skip("the fused operators are not built")
    assert chosen(*halves).all_halves(SmallModel.random().config) == {*halves, *HALVES}
    decoder, _ = SmallModel.random().build()
    found = [(one.attention.fused, one.feed_forward.fused) for one in decoder.layers]
    assert found == [(True, True), tuple(name in HALVES for name in halves)]
    assert not decoder.fused
    assert not decoder.decodes_tokens


def updated(recompute):
    groups = random_groups()
    rng = np.random.default_rng(2)
    rows = {
        "weights": rows_like(groups, lambda n: np.full(n, 0.02)),
        "advantages": rows_like(groups, lambda n: np.full(n, rng.normal())),
    }
    rows["old_log_probs"] = rows["reference_log_probs"] = rows_like(groups, lambda n: np.full(n, -4.0))
    subject = Subject(SmallModel.random(6, num_layers=1), clip_and_kl(), TEMPERATURE, recompute=recompute)
    return subject.updater(groups, RATE, **rows), subject.gradients


@pytest.fixture(scope="module")
def family_update():
    """The update of the family's own halves; computed again, it has the same bits."""
    return updated(recompute=False)


@pytest.mark.parametrize(
    ("halves", "recompute"), few_of([(MIXED[1], True)], [(MIXED[0], True), (MIXED[0], False), (MIXED[1], False)])
)
def test_updates(chosen, family_update, halves, recompute):
    plain, expected = family_update
    chosen(*halves)
    update, gradients = updated(recompute)
    assert update.loss == pytest.approx(plain.loss, rel=1e-5)
    for name, gradient in expected.items():
        assert_close(gradients[name], gradient, 2e-5, name)


def generated():
    subject = engine_subject.Subject.random(num_layers=1)
    return by_sample(subject.engine(4, bucket=32).generate(subject.prompts, 2, engine_subject.STEP))


@pytest.fixture(scope="module")
def plain_rollouts():
    """What the halves of the family generate."""
    return generated()


@pytest.mark.parametrize("halves", [MIXED[0], pytest.param(MIXED[1], marks=pytest.mark.slow)])
def test_generation(chosen, plain_rollouts, halves):
    chosen(*halves)
    for key, rollout in generated().items():
        np.testing.assert_array_equal(rollout.response_ids, plain_rollouts[key].response_ids)
        expected = plain_rollouts[key].row("policy_log_probs")
        np.testing.assert_allclose(rollout.row("policy_log_probs"), expected, atol=1e-4)
