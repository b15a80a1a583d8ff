"""Side outputs of layers, and terms of the loss from them: in one process, in a pipeline, and computed again."""

import numpy as np
import pytest
from slow_cases import few_of
from small_updater import assert_close
from watched import COEFFICIENT, LAYERS, TERM, WATCHED, Subject, watched
from workers import run_workers

from mindrlhf.backend.cpu import CPU
from mindrlhf.backend.process.launch import World

ALONE = World(rank=0, size=1, device_target="CPU")
STAGES, SHARDS = {"pipeline_stage": 2, "offset": (1, 0)}, {"model_parallel": 2}
NAMES = (
    "model.tok_embeddings.embedding_weight",
    "model.layers.0.attention.wq.weight",
    "model.layers.0.ffn_norm.weight",
    "model.layers.1.feed_forward.w1.weight",
    "model.layers.2.ffn_norm.weight",
)


@pytest.fixture(scope="module", autouse=True)
def made_up():
    with watched():
        yield


@pytest.fixture(scope="module")
def plain() -> Subject:
    return Subject(ALONE, {})


@pytest.fixture(scope="module")
def computed_again() -> Subject:
    if not CPU.operators().fused:
        pytest.skip("only fused halves are computed again")
    return Subject(ALONE, {}, recompute=True)


@pytest.fixture(scope="module", params=few_of(["plain"], ["computed_again"]))
def subject(request) -> Subject:
    return request.getfixturevalue(request.param)


def test_each_layer_gives_its_own(subject):
    loss, terms, sides, _ = subject.results()
    assert len(sides) == 2
    for micro in sides:
        assert list(micro) == [(number, name) for number in WATCHED for name in (TERM, "sums")]
        assert all(micro[number, TERM].shape == () and micro[number, TERM] > 0 for number in WATCHED)
        assert all(micro[number, "sums"].shape == (32,) for number in WATCHED)
    assert 0 < terms[TERM] < loss
    least, most = (pick(sum(micro[number, TERM] for number in WATCHED) for micro in sides) for pick in (min, max))
    assert COEFFICIENT * least < terms[TERM] < COEFFICIENT * most  # the tokens' weights have the sum 1


@pytest.mark.parametrize("name", NAMES)
def test_the_gradient_is_that_of_the_loss_with_its_term(subject, name):
    """Along the gradient, the loss changes by its norm."""
    subject()
    gradient = subject.gradients[name].astype(np.float64)
    norm = np.linalg.norm(gradient)
    values = subject.side.parameters[name].asnumpy()
    first, step = values.copy(), 0.02 * gradient / norm
    losses = []
    for sign in (1, -1):
        values[...] = first + sign * step
        losses.append(subject().loss)
    values[...] = first
    assert (losses[0] - losses[1]) / 0.04 == pytest.approx(norm, rel=0.01)


@pytest.mark.slow
def test_without_the_term_the_gradients_are_others(plain):
    with_term, without = plain.results(), Subject(ALONE, {}, coefficient=0.0).results()
    assert without[1] == {TERM: 0.0}
    assert with_term[0] == pytest.approx(without[0] + with_term[1][TERM], rel=1e-5)
    for name in NAMES:
        difference = np.linalg.norm(with_term[3][name] - without[3][name])
        assert difference > 0.01 * np.linalg.norm(without[3][name]), name


def on_rank(world, layout: dict, recompute: bool) -> tuple:
    with watched():
        return Subject(world, layout, recompute).results()


@pytest.mark.slow
@pytest.mark.msrun
@pytest.mark.parametrize(("layout", "recompute"), [(STAGES, True), (STAGES, False), (SHARDS, True)])
def test_pipelines_and_shards_give_the_same(plain, layout, recompute):
    loss, terms, sides, gradients = plain.results()
    assert LAYERS == 3
    for found in run_workers(2, __file__, "on_rank", layout=layout, recompute=recompute, timeout=550):
        assert found[0] == pytest.approx(loss, rel=1e-5)
        assert found[1] == pytest.approx(terms, rel=1e-5)
        for one, other in zip(found[2], sides, strict=True):
            assert list(one) == list(other)
            for side, array in other.items():
                np.testing.assert_allclose(one[side], array, rtol=1e-4, atol=1e-4, err_msg=str(side))
        for name, gradient in gradients.items():
            assert_close(found[3][name], gradient, 2e-5, name)
