"""Routing that a pass records or replays, against the float64 oracle."""

from dataclasses import replace

import numpy as np
import pytest
from oracle_routing import SPARSE, by_layer, chosen, random_routing
from slow_cases import few_of
from small_model import SmallModel
from small_updater import RATE, Subject, assert_close, random_groups, rows_like

from mindrlhf.backend.cpu import CPU
from mindrlhf.backend.operators import COMPOSED
from mindrlhf.configs.grpo import TrainSettings
from mindrlhf.models.routing import RoutingForm
from mindrlhf.training.first_routing import FirstRouting
from mindrlhf.training.graphs import PolicyLogProbs
from mindrlhf.training.objective import NEGATIVE_LOG_LIKELIHOOD
from mindrlhf.training.scoring import Scorer

TEMPERATURE = 0.7
SMALL = TrainSettings(max_tokens_per_micro_batch=80, length_bucket=16)  # several micro-batches of one shape
ROUTER = "model.layers.0.feed_forward.routed_experts.router.dense.weight"


@pytest.fixture(scope="module", params=["normalised", "shares"])
def kind(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def model(kind) -> SmallModel:
    return SmallModel.random(4, **SPARSE | {"norm_topk_prob": kind == "normalised"})


@pytest.fixture(scope="module")
def groups():
    return [replace(group, identity=(i,)) for i, group in enumerate(random_groups(7))]


@pytest.fixture(scope="module")
def scorers(kind, model):
    """One that records and one that does not, over fused normalised experts and composed others."""
    operators = CPU.operators() if kind == "normalised" else COMPOSED
    head = PolicyLogProbs(model.build(operators=operators, replays=True, records=True)[0], TEMPERATURE)
    first = FirstRouting()
    return Scorer(head, SMALL, first=first), first, Scorer(head, SMALL)


@pytest.fixture(scope="module")
def subject(model):
    return Subject(model, NEGATIVE_LOG_LIKELIHOOD, replays=True, records=True, moves=True)


@pytest.mark.parametrize("kind", few_of(["normalised"], ["shares"]), indirect=True, scope="module")
def test_given_experts_compute_the_tokens_with_shares_of_the_whole_softmax(model, groups, scorers):
    """Every other group's; for the rest the routers choose."""
    form = RoutingForm.of(model.config)
    mixed = [
        replace(group, routing=random_routing(form, group, i)) if i % 2 else group for i, group in enumerate(groups)
    ]
    scored = scorers[-1](mixed)
    for group, rows in zip(mixed, scored, strict=True):
        for g, (response, row) in enumerate(zip(group.responses, rows, strict=True)):
            routing = by_layer(form, group.routing, g) if group.routing else None
            expected = model.log_probs(group.prompt_ids, response, TEMPERATURE, routing=routing)
            np.testing.assert_allclose(row, expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize("kind", few_of(["shares"], ["normalised"]), indirect=True, scope="module")
def test_a_router_has_the_gradient_of_the_shares_that_it_gives_to_given_experts(model, groups, subject):
    form = RoutingForm.of(model.config)
    given = [replace(group, routing=random_routing(form, group, i)) for i, group in enumerate(groups)]
    subject.updater(given, 0.0, weights=rows_like(given, np.ones))

    def loss(router) -> float:
        return -sum(
            model.log_probs(
                group.prompt_ids, response, arrays={ROUTER: router}, routing=by_layer(form, group.routing, g)
            ).sum()
            for group in given
            for g, response in enumerate(group.responses)
        )

    first = model.arrays[ROUTER].astype(np.float64)
    direction = np.random.default_rng(0).standard_normal(first.shape) * 1e-5
    slope = (loss(first + direction) - loss(first - direction)) / 2
    assert (subject.gradients[ROUTER] * direction).sum() == pytest.approx(slope, rel=1e-3)


@pytest.mark.parametrize("kind", few_of(["normalised"], ["shares"]), indirect=True, scope="module")
def test_a_pass_records_what_the_routers_choose(model, groups, scorers):
    scorer, first, other = scorers
    own = scorer(groups)
    for group in first.given(groups):
        for response, rows in zip(group.responses, group.routing.responses, strict=True):
            expected = chosen(model, group.prompt_ids, response)
            found = np.concatenate((group.routing.prompt, rows))
            assert found.dtype == np.uint8
            np.testing.assert_array_equal(found, expected)
    again = other(first.given(groups))
    for rows, same in zip(own, again, strict=True):
        for row, other in zip(rows, same, strict=True):
            np.testing.assert_array_equal(row, other)


@pytest.mark.parametrize("kind", few_of(["shares"], ["normalised"]), indirect=True, scope="module")
def test_gradients_with_own_experts_given_are_those_without(model, groups, subject):
    """Giving the experts that the routers choose anyway changes no number."""
    plain = Subject(model, NEGATIVE_LOG_LIKELIHOOD)
    weights = rows_like(groups, np.ones)
    plain.updater(groups, RATE, weights=weights)
    subject.updater(groups, 0.0, weights=weights)
    for name, gradient in plain.gradients.items():
        assert_close(subject.gradients[name], gradient, 1e-6, name)


@pytest.mark.parametrize("kind", few_of(["shares"], ["normalised"]), indirect=True, scope="module")
def test_updates_record_what_they_replay(model, groups, subject):
    """The first update chooses; a second one far away keeps its experts, and would choose others."""
    weights = rows_like(groups, lambda count: np.full(count, 0.01))

    def update(batch):
        return subject.updater(batch, 0.3, weights=weights).routing

    first = update(groups)
    second = update([replace(group, routing=one) for group, one in zip(groups, first, strict=True)])
    third = update(groups)
    differ = 0
    for group, one, same, other in zip(groups, first, second, third, strict=True):
        for g, response in enumerate(group.responses):
            if one is first[0]:
                own = np.concatenate((one.prompt, one.responses[g]))
                np.testing.assert_array_equal(own, chosen(model, group.prompt_ids, response))
            np.testing.assert_array_equal(same.responses[g], one.responses[g])
            differ += np.count_nonzero(other.responses[g] != one.responses[g])
        np.testing.assert_array_equal(same.prompt, one.prompt)
    assert differ > 0


def test_many_experts_have_a_wider_dtype():
    assert RoutingForm((0, 2), 255, 8).dtype is np.uint8
    wide = RoutingForm((0, 2), 256, 8)
    assert wide.dtype is np.uint16
    assert wide.unknown(3).tolist() == [[256] * 16] * 3
    assert wide.columns(2) == slice(8, 16)
