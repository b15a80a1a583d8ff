"""The fused half with experts: decode steps against float64, updates against composed ones, and rows in any company."""

import functools

import numpy as np
import pytest
import reference_model
from bfloat16_numbers import rounded
from int8_numbers import int8
from mindspore import Tensor, nn
from slow_cases import few_of
from small_model import EXPERTS, SmallModel
from small_updater import Subject, assert_close, random_groups, rows_like

from mindrlhf.backend import native
from mindrlhf.backend.native.operators import open_operators
from mindrlhf.backend.operators import COMPOSED
from mindrlhf.configs.lora import Adapter
from mindrlhf.models.decoder import Decoder
from mindrlhf.models.initialize import build_parameters
from mindrlhf.models.packed import PackedWeights
from mindrlhf.models.parameters import decoded_rows
from mindrlhf.training.objective import NEGATIVE_LOG_LIKELIHOOD

# Widths that are no multiples of a register, and more experts than some steps have rows.
SIZES = EXPERTS | {"hidden_size": 40, "moe_intermediate_size": 20, "num_experts": 9, "num_experts_per_tok": 3}
ADAPTER = Adapter(3, 6)
DEQUANTISED = {"float32": np.float64, "bfloat16": lambda x: rounded(x.astype(np.float64)), "int8": None}
TOLERANCE = {"float32": 2e-6, "bfloat16": 1e-2, "int8": 3e-2}  # columns are rounded too


def dequantised(kind: str, stack: np.ndarray) -> np.ndarray:
    if kind == "int8":
        return np.stack([int8(one.astype(np.float64)) for one in stack])
    return DEQUANTISED[kind](stack)


class Decoded(nn.Cell):
    """The half of the layer with experts: [B, hidden] -> [B, hidden]."""

    def __init__(self, decoder):
        super().__init__(auto_prefix=False)
        self.half = decoder.layers[1].feed_forward

    def construct(self, x):
        return self.half.decode(x, ())


def decoded(model: SmallModel, kind: str):
    """Builds the half for this dtype of weights."""
    operators = open_operators("float32", kind)
    parameters = build_parameters(model.specs, lambda spec: model.arrays[spec.name])
    packed = {} if kind == "float32" else PackedWeights(kind, decoded_rows(model.config), parameters).packed
    half = Decoded(Decoder(model.config, parameters, operators, 64, packed=packed))
    return lambda x: half(Tensor(x)).asnumpy()


def expected(model: SmallModel, kind: str, x: np.ndarray) -> np.ndarray:
    arrays = dict(model.arrays)
    for spec in model.specs:
        if spec.pieces and not spec.adapts:
            arrays[spec.name] = dequantised(kind, arrays[spec.name])
    weights, prefix = model.merged(arrays), "model.layers.1."
    weights = {name: np.asarray(array, np.float64) for name, array in weights.items()}
    h = reference_model.rms_norm(x, weights[f"{prefix}post_attention_layernorm.weight"], model.config.rms_norm_eps)
    return x + reference_model.experts(model.config, weights, prefix, h)


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("float32", {}),
        ("float32", {"adapter": ADAPTER, "norm_topk_prob": False}),
        ("bfloat16", {"adapter": ADAPTER}),
        ("int8", {"norm_topk_prob": False}),
        ("int8", {"adapter": ADAPTER}),
    ],
)
def test_decoded_rows(fused, kind, changes):
    model = SmallModel.random(2, **SIZES | changes)
    half = decoded(model, kind)
    x = np.random.default_rng(0).standard_normal((70, 40)).astype(np.float32)
    every = half(x)
    exact = expected(model, kind, x.astype(np.float64))
    assert_close(every - x, exact - x, TOLERANCE[kind])
    for count in (1, 9, 33):
        assert half(x[:count]).tobytes() == every[:count].tobytes()


def updated(model, operators, recompute=False):
    groups = random_groups()
    rng = np.random.default_rng(5)
    weights = rows_like(groups, lambda n: rng.standard_normal(n) / 50)
    subject = Subject(model, NEGATIVE_LOG_LIKELIHOOD, operators=operators, recompute=recompute)
    return subject.updater(groups, 0.0, weights=weights), subject.gradients


def one_layer(adapted: bool) -> SmallModel:
    changes = {"adapter": ADAPTER, "norm_topk_prob": False} if adapted else {}
    return SmallModel.random(2, **SIZES | {"num_layers": 1, "decoder_sparse_step": 1} | changes)


@functools.cache
def composed(adapted: bool):
    """The update that both dtypes are compared with."""
    return updated(one_layer(adapted), COMPOSED)


@pytest.mark.parametrize(
    ("dtype", "adapted", "tolerance"),
    few_of(
        [("float32", False, 1e-5)],
        [("bfloat16", False, 0.05), ("float32", True, 1e-5)],
    ),
)
def test_updates(fused, dtype, adapted, tolerance):
    if dtype == "bfloat16" and not native.library().bfloat16:
        pytest.skip("this processor has no fast bfloat16 products")
    model = one_layer(adapted)
    plain, wanted = composed(adapted)
    operators = open_operators(dtype)
    runs = [updated(model, operators, recompute) for recompute in (False, True)]
    for update, gradients in runs:
        assert update.loss == pytest.approx(plain.loss, rel=tolerance, abs=tolerance)
        for name, gradient in wanted.items():
            assert_close(gradients[name], gradient, tolerance, name)
        for side, array in plain.sides[0].items():
            np.testing.assert_allclose(update.sides[0][side], array, rtol=tolerance, atol=40 * tolerance)
    for name, gradient in runs[0][1].items():
        np.testing.assert_array_equal(runs[1][1][name], gradient)
