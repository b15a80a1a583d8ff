"""AdamW with rounded moments: near float64, the same bits however rows are cut, and no enormous steps."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from slow_cases import few_of

from mindrlhf import backend
from mindrlhf.backend.native.operators import open_operators
from mindrlhf.backend.operators import COMPOSED
from mindrlhf.configs.grpo import OptimizerSettings
from mindrlhf.models.parameters import ParameterSpec
from mindrlhf.optimizer_state import BLOCK, decode
from mindrlhf.training.moments import Draws, Place, write_moment
from mindrlhf.training.optimizer import AdamW, ReplicaShare

SHAPES = {"matrix": (50, 300), "norm": (300,), "stack": (3, 4, 130), "head": (7, 128)}
RATE = 1e-2
STATES = ("bfloat16", "int8")
LEAST = {"bfloat16": (2.0**-7, 0.0, 0.0), "int8": (1 / 8, 2.0**-17, 2.0**-31)}  # share of the number, of the scale


def specs(shapes=SHAPES):
    kinds = {"norm": "norm", "head": "head"}
    return [ParameterSpec(name, name, shape, kinds.get(name, "matrix"), "first") for name, shape in shapes.items()]


@pytest.fixture(scope="module", params=few_of(["fused"], ["composed"]))
def operators(request):
    if request.param == "composed":
        return COMPOSED
    return open_operators() or pytest.skip("the fused operators cannot be built here")


class Subject:
    """An optimizer over some rows of parameters, by default all."""

    def __init__(self, operators, state, shapes=SHAPES, rows=None, block_numbers=None, **settings):
        import mindspore
        from mindspore import Parameter, Tensor

        mindspore.set_context(mode=mindspore.GRAPH_MODE, device_target="CPU")
        rng = np.random.default_rng(0)
        table = specs(shapes)
        whole = [Parameter(Tensor(rng.normal(size=one.shape).astype(np.float32)), name=one.name) for one in table]
        self.rows = rows or [slice(0, one.shape[0]) for one in table]
        self.parts = [
            Parameter(Tensor(np.array(one.asnumpy()[own])), name=f"share.{one.name}")
            for one, own in zip(whole, self.rows, strict=True)
        ]
        places = [
            Place(one.name, (own, *(slice(0, size) for size in one.shape[1:])), one.shape)
            for one, own in zip(table, self.rows, strict=True)
        ]
        share = ReplicaShare(self.parts, self.rows, lambda: None)
        settings = OptimizerSettings(**{"max_grad_norm": 0.0, "beta2": 0.999, "state": state} | settings)
        given = {"block_numbers": block_numbers, "operators": operators, "places": places, "seed": 7}
        self.optimizer = AdamW(settings, whole, table, share=share, **given)

    def step(self, gradients, rate=RATE):
        for buffer, gradient in zip(self.optimizer.gradients, gradients, strict=True):
            backend.write(buffer, gradient)
        assert self.optimizer.step(rate).applied
        assert not any(buffer.asnumpy().any() for buffer in self.optimizer.gradients)

    def moments(self, index):
        """Both moments of a parameter as float32, and their scales or None."""
        moments = self.optimizer.moments
        found = []
        for moment, scales in zip((moments.first, moments.second), moments.scales, strict=True):
            numbers, scale = backend.read(moment[index]), scales[index]
            values = numbers.astype(np.float32) if scale is None else decode(numbers, backend.read(scale))
            found.append((np.array(values), None if scale is None else np.array(backend.read(scale))))
        return found

    def bits(self):
        """The bytes of weights and moments, by parameter."""
        arrays = self.optimizer.moments.arrays
        every = enumerate(self.parts)
        return [[one.asnumpy().tobytes() for one in (part, *arrays(index))] for index, part in every]


def gradients_of(step, shapes=SHAPES, powers=(-4, 1)):
    rng = np.random.default_rng([step, 9])
    sizes = [10.0 ** rng.integers(*powers, shape) for shape in shapes.values()]
    return [(rng.normal(size=size.shape) * size).astype(np.float32) for size in sizes]


@pytest.mark.parametrize("state", STATES)
def test_each_update_is_that_of_float64_from_the_moments_before_it(operators, state):
    """The weights to rounding of float32, the moments to their form: they move to one of both neighbours."""
    subject = Subject(operators, state, weight_decay=0.1)
    share, *least = LEAST[state]
    first, second = 0.9, 0.999
    for step in range(1, 4):
        before = [(subject.moments(i), part.asnumpy().astype(np.float64)) for i, part in enumerate(subject.parts)]
        gradients = gradients_of(step)
        subject.step(gradients)
        for index, (((m, _), (v, _)), weight) in enumerate(before):
            g = gradients[index].astype(np.float64)
            m = first * m.astype(np.float64) + (1 - first) * g
            v = second * v.astype(np.float64) + (1 - second) * g * g
            decay = 0.0 if specs()[index].kind == "norm" else 0.1
            mean, variance = m / (1 - first**step), v / (1 - second**step)
            weight = weight - RATE * (mean / (np.sqrt(variance) + 1e-8) + decay * weight)
            np.testing.assert_allclose(subject.parts[index].asnumpy(), weight, rtol=2e-6, atol=2e-6)
            exact = subject.optimizer.moments.forms[index] == "float32"
            for (found, scales), expected, floor in zip(subject.moments(index), (m, v), least, strict=True):
                wide = 0.0 if scales is None else np.repeat(scales, BLOCK, -1)[..., : found.shape[-1]] * floor
                bound = np.maximum((0.0 if exact else share) * np.abs(expected), wide) + 1e-4 * np.abs(expected)
                assert (np.abs(found - expected) <= bound).all()


@pytest.mark.slow
@pytest.mark.parametrize("state", STATES)
def test_fused_and_composed_moments_agree(state):
    """But for numbers whose last bit decides how they are rounded."""
    fused = open_operators() or pytest.skip("the fused operators cannot be built here")
    subjects = [Subject(operators, state) for operators in (fused, COMPOSED)]
    for step in range(3):
        for subject in subjects:
            subject.step(gradients_of(step))
    for index in range(len(SHAPES)):
        for (found, _), (expected, _) in zip(*(subject.moments(index) for subject in subjects), strict=True):
            np.testing.assert_allclose(found, expected, rtol=0.13)
            if subjects[0].optimizer.moments.forms[index] == state:
                assert (found != expected).mean() < 1e-3
        one, other = (subject.parts[index].asnumpy() for subject in subjects)
        np.testing.assert_allclose(one, other, rtol=0, atol=2e-3 * RATE)


@pytest.mark.parametrize("state", STATES)
def test_rows_of_replicas_and_blocks_are_the_same_bits(operators, state):
    whole = Subject(operators, state)
    blocks = Subject(operators, state, block_numbers=2000)
    cuts = {0: (20, 200, 1, 2), 1: (50, 300, 3, 7)}
    upper = Subject(operators, state, rows=[slice(0, cut) for cut in cuts[0]])
    lower = Subject(operators, state, rows=[slice(*ends) for ends in zip(cuts[0], cuts[1], strict=True)])
    assert len(blocks.optimizer.blocks) > 2
    for step in range(2):
        for subject in (whole, blocks, upper, lower):
            subject.step(gradients_of(step))
    assert whole.bits() == blocks.bits()
    for one, first, second in zip(whole.bits(), upper.bits(), lower.bits(), strict=True):
        assert one == [a + b for a, b in zip(first, second, strict=True)]


UPDATES = """
import hashlib, sys
from test_moments import Subject, gradients_of, open_operators
subject = Subject(open_operators(), sys.argv[1], {"matrix": (300, 700)})
for step in range(2):
    subject.step(gradients_of(step, {"matrix": (300, 700)}))
print(hashlib.sha256(b"".join(subject.bits()[0])).hexdigest())
"""


@pytest.mark.slow
@pytest.mark.parametrize("state", STATES)
def test_two_threads_compute_the_same_bits(state):
    if open_operators() is None:
        pytest.skip("the fused operators cannot be built here")
    here = Path(__file__).parent
    path = os.pathsep.join(map(str, (here, here.parent / "helpers", here.parents[1])))
    found = set()
    for threads in ("1", "2"):
        environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": threads}
        command = [sys.executable, "-c", UPDATES, state]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        found.add(done.stdout.split()[-1])
    assert len(found) == 1


def test_another_seed_rounds_in_another_way_and_float32_has_none():
    subject, other = (Draws(seed, [Place.whole(one) for one in specs()])(3) for seed in (1, 2))
    assert not np.array_equal(subject[0].asnumpy(), other[0].asnumpy())
    exact = Subject(COMPOSED, "float32").optimizer
    assert [len(graphs) for graphs in exact._apply] == [1]
    assert exact._apply[0][0][1] is None


def test_draws_are_uniform_and_follow_from_the_place_alone():
    whole = Place("w", (slice(0, 400), slice(0, 300)), (400, 300))
    rows, columns = (draw.asnumpy() for draw in Draws(5, [whole])(8))
    every = (rows[:, None] + columns[:, None]) % 1.0
    assert every.shape == (2, 400, 300)
    np.testing.assert_allclose([every.mean(), every.var()], [1 / 2, 1 / 12], atol=3e-3)
    assert abs(np.corrcoef(every[0].ravel(), every[1].ravel())[0, 1]) < 0.02
    assert abs(np.corrcoef(every[0, :-1].ravel(), every[0, 1:].ravel())[0, 1]) < 0.02
    part = Place("w", (slice(100, 200), slice(60, 300)), (400, 300))
    own_rows, own_columns = (draw.asnumpy() for draw in Draws(5, [part])(8))
    np.testing.assert_array_equal(own_rows, rows[100:200])
    np.testing.assert_array_equal(own_columns, columns)
    stack = Place("e", (slice(1, 3), slice(2, 4), slice(0, 9)), (4, 5, 9))
    assert stack.rows.tolist() == [7, 8, 12, 13]
    assert (part.column, stack.column) == (60, 0)


@pytest.mark.parametrize("state", STATES)
def test_a_second_moment_decays_at_its_rate(operators, state):
    """Rounded to the nearest it would stay where it is: each update changes it by a thousandth."""
    shapes = {"matrix": (40, 256)}
    subject = Subject(operators, state, shapes)
    subject.step([np.ones((40, 256), np.float32)])
    for _ in range(100):
        subject.step([np.zeros((40, 256), np.float32)])
    _, (second, _) = subject.moments(0)
    np.testing.assert_allclose(second.mean(), 1e-3 * 0.999**100, rtol=0.01)


@pytest.mark.parametrize("state", STATES)
def test_small_gradients_beside_a_large_one_make_no_large_steps(operators, state):
    """They are up to 1e8 times smaller, and steps are at most those that float32 moments may make."""
    shapes = {"matrix": (8, BLOCK)}
    subject = Subject(operators, state, shapes, eps=1e-15, weight_decay=0.0)
    rng = np.random.default_rng(1)
    sizes = 10.0 ** rng.uniform(-8, -1, (8, BLOCK))
    sizes[:, 5] = 1.0
    for step in range(40):
        before = np.array(subject.parts[0].asnumpy())
        gradient = sizes * rng.normal(size=sizes.shape)
        gradient[:, 5] *= 1.0 if step < 5 else 1e-6  # the large one fades
        subject.step([gradient.astype(np.float32)])
        assert np.abs(subject.parts[0].asnumpy() - before).max() <= 8 * RATE


@pytest.mark.parametrize("state", STATES)
def test_moments_that_are_read_back_as_float32_go_on_alike(operators, state):
    subject, other = Subject(operators, state), Subject(operators, state)
    for step in range(2):
        subject.step(gradients_of(step))
    for index, part in enumerate(subject.parts):
        backend.write(other.parts[index], part.asnumpy())
        kept = other.optimizer.moments
        pairs = zip((kept.first, kept.second), kept.scales, subject.moments(index), strict=True)
        for moment, scales, (values, _) in pairs:
            write_moment(moment[index], scales[index], values)
    other.optimizer.load_state_dict(subject.optimizer.state_dict())
    for one in (subject, other):
        one.step(gradients_of(3))
    assert subject.bits() == other.bits()
