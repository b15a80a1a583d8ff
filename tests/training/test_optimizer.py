"""AdamW against the published algorithm in float64, and what it does with gradients that are not finite."""

import numpy as np
import pytest
from slow_cases import few_of

from mindrlhf.backend.native.operators import open_operators
from mindrlhf.backend.operators import COMPOSED
from mindrlhf.configs.grpo import OptimizerSettings
from mindrlhf.models.parameters import ParameterSpec
from mindrlhf.training.optimizer import AdamW

KINDS = ("matrix", "bias", "norm", "embedding", "head")
DECAYING = ("matrix", "head")


def specs():
    shapes = {"matrix": (5, 3), "bias": (5,), "norm": (3,), "embedding": (7, 3), "head": (7, 3)}
    return [ParameterSpec(kind, kind, shapes[kind], kind, "first") for kind in KINDS]


def start(seed=0):
    """Kind -> initial float64 weights that float32 holds exactly."""
    rng = np.random.default_rng(seed)
    return {spec.kind: rng.normal(size=spec.shape).astype(np.float32).astype(np.float64) for spec in specs()}


def gradients_of(step, scale=1.0):
    """Of very different sizes, from element to element as well."""
    rng = np.random.default_rng([step, 5])
    return {
        spec.kind: (scale * rng.normal(size=spec.shape) * 10.0 ** rng.integers(-4, 1, spec.shape)).astype(np.float32)
        for spec in specs()
    }


class Reference:
    """Loshchilov & Hutter 2019, algorithm 2, with the clipping of torch's clip_grad_norm_."""

    def __init__(self, settings: OptimizerSettings, weights: dict):
        self.settings, self.weights, self.updates = settings, weights, 0
        self.first = {kind: np.zeros_like(value) for kind, value in weights.items()}
        self.second = {kind: np.zeros_like(value) for kind, value in weights.items()}

    def step(self, gradients: dict, rate: float) -> float:
        s = self.settings
        self.updates += 1
        norm = np.sqrt(sum((g.astype(np.float64) ** 2).sum() for g in gradients.values()))
        scale = min(1.0, s.max_grad_norm / (norm + 1e-6)) if s.max_grad_norm else 1.0
        for kind, gradient in gradients.items():
            g = gradient.astype(np.float64) * scale
            self.first[kind] = s.beta1 * self.first[kind] + (1 - s.beta1) * g
            self.second[kind] = s.beta2 * self.second[kind] + (1 - s.beta2) * g**2
            mean = self.first[kind] / (1 - s.beta1**self.updates)
            variance = self.second[kind] / (1 - s.beta2**self.updates)
            decay = s.weight_decay if kind in DECAYING else 0.0
            self.weights[kind] -= rate * (mean / (np.sqrt(variance) + s.eps) + decay * self.weights[kind])
        return norm


class Subject:
    """An optimizer over one parameter of each kind."""

    def __init__(self, settings, block_numbers=None, operators=COMPOSED):
        import mindspore
        from mindspore import Parameter, Tensor

        mindspore.set_context(mode=mindspore.GRAPH_MODE, device_target="CPU")
        self.parameters = {k: Parameter(Tensor(v.astype(np.float32)), name=k) for k, v in start().items()}
        self.optimizer = AdamW(
            settings, list(self.parameters.values()), specs(), block_numbers=block_numbers, operators=operators
        )

    def accumulate(self, gradients):
        for buffer, kind in zip(self.optimizer.gradients, KINDS, strict=True):
            buffer.asnumpy()[...] += gradients[kind]

    def state(self):
        groups = {"weight": self.parameters.values(), "first": self.optimizer.first, "second": self.optimizer.second}
        return {name: [np.array(p.asnumpy()) for p in group] for name, group in groups.items()}

    def assert_gradients_are_zero(self):
        for buffer in self.optimizer.gradients:
            assert (buffer.asnumpy() == 0).all()


SETTINGS = [
    OptimizerSettings(weight_decay=0.3, max_grad_norm=0.0),
    OptimizerSettings(weight_decay=0.1, max_grad_norm=1.0, beta1=0.8, beta2=0.999, eps=1e-4),
]


@pytest.fixture(scope="module", params=["composed", "fused"])
def operators(request):
    """What the optimizer's graphs are built from."""
    if request.param == "composed":
        return COMPOSED
    return open_operators() or pytest.skip("the fused operators cannot be built here")  # tests/backend says why


@pytest.mark.parametrize(
    "settings", [pytest.param(SETTINGS[0], marks=pytest.mark.slow), SETTINGS[1]], ids=["unclipped", "clipped"]
)
def test_several_updates_are_those_of_the_paper(operators, settings):
    """The third is at rate 0, which moves the moments only; the fourth has a small gradient that is not clipped."""
    subject, reference = Subject(settings, operators=operators), Reference(settings, start())
    for step, (rate, scale) in enumerate(
        [(1e-2, 1.0), (3e-2, 10.0), (0.0, 1.0), (1e-2, 0.02), (2e-2, 1.0), (2e-2, 3.0)]
    ):
        gradients = gradients_of(step, scale)
        subject.accumulate(gradients)
        result = subject.optimizer.step(rate)
        norm = reference.step(gradients, rate)
        assert result.applied
        assert result.learning_rate == rate
        np.testing.assert_allclose(result.grad_norm, norm, rtol=1e-5)
        subject.assert_gradients_are_zero()
        for kind, parameter, first, second in zip(
            KINDS, subject.parameters.values(), subject.optimizer.first, subject.optimizer.second, strict=True
        ):
            np.testing.assert_allclose(parameter.asnumpy(), reference.weights[kind], rtol=2e-6, atol=2e-6, err_msg=kind)
            np.testing.assert_allclose(first.asnumpy(), reference.first[kind], rtol=1e-4, atol=1e-9)
            np.testing.assert_allclose(second.asnumpy(), reference.second[kind], rtol=1e-4, atol=1e-15)
    assert subject.optimizer.updates == 6


@pytest.fixture(scope="module")
def twins(operators):
    """Two optimizers in the same state, one update old."""
    twins = Subject(SETTINGS[0], operators=operators), Subject(SETTINGS[0], operators=operators)
    for twin in twins:
        twin.accumulate(gradients_of(50))
        twin.optimizer.step(1e-2)
    return twins


def test_an_update_from_no_token_changes_nothing(twins):
    """Neither moments nor the counter, which would both shape later updates; and it is no failure."""
    subject, other = twins
    result = subject.optimizer.step(1e-2, empty=True)
    assert (result.applied, result.failed, result.empty, result.learning_rate) == (False, False, True, 1e-2)
    assert subject.optimizer.updates == other.optimizer.updates == 1
    assert_same_state(subject, other)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e30], ids=["nan", "inf", "minus-inf", "square-overflows"])
def test_a_gradient_that_is_not_finite_changes_nothing(twins, bad):
    """One twin meets it, the other does not; then both go on."""
    subject, other = twins
    gradients = gradients_of(51)
    gradients["norm"][1] = bad
    subject.accumulate(gradients)
    result = subject.optimizer.step(1e-2)
    assert not result.applied
    assert not np.isfinite(result.grad_norm)
    subject.assert_gradients_are_zero()
    assert_same_state(subject, other)
    for twin in twins:
        twin.accumulate(gradients_of(52))
        assert twin.optimizer.step(1e-2).applied
    assert_same_state(subject, other)


def assert_same_state(subject, other):
    assert subject.optimizer.updates == other.optimizer.updates
    for name, arrays in subject.state().items():
        for mine, its in zip(arrays, other.state()[name], strict=True):
            assert np.isfinite(mine).all()
            np.testing.assert_array_equal(mine, its)


def test_a_gradient_of_zero_decays_matrices_only(operators):
    subject = Subject(OptimizerSettings(weight_decay=0.5), operators=operators)
    before = {kind: np.array(p.asnumpy()) for kind, p in subject.parameters.items()}
    assert subject.optimizer.step(0.1).grad_norm == 0
    for kind, parameter in subject.parameters.items():
        share = 0.95 if kind in DECAYING else 1.0
        np.testing.assert_allclose(parameter.asnumpy(), share * before[kind], rtol=1e-6)


def test_buffers_are_named_after_their_weights(twins):
    optimizer = twins[0].optimizer
    for prefix, group in (
        ("gradient", optimizer.gradients),
        ("exp_avg", optimizer.first),
        ("exp_avg_sq", optimizer.second),
    ):
        assert [buffer.name for buffer in group] == [f"{prefix}.{kind}" for kind in KINDS]
        assert not any(buffer.requires_grad for buffer in group)


@pytest.mark.parametrize("operators", few_of(["fused"], ["composed"]), indirect=True, scope="module")
def test_updates_in_blocks_are_the_same_bits(operators):
    whole, parts = (Subject(OptimizerSettings(), numbers, operators) for numbers in (None, 20))
    assert whole.optimizer.blocks == ((0, 1, 2, 3, 4),)
    assert parts.optimizer.blocks == ((0, 1), (2,), (3,), (4,))
    used = []
    parts.optimizer.before_block = used.append
    for step in range(2):
        for subject in (whole, parts):
            subject.accumulate(gradients_of(step))
            subject.optimizer.step(1e-2)
    assert used == [0, 1, 2, 3, 0, 1, 2, 3]
    expected = whole.state()
    for name, arrays in parts.state().items():
        for array, other in zip(arrays, expected[name], strict=True):
            assert array.tobytes() == other.tobytes(), name
