"""The half with experts on two ranks that have other rows: outputs and gradients, by the float64 oracle.

Operators run one by one, which takes no time to compile; whole layouts are in `parallel/test_sharded_updates.py`.
"""

import numpy as np
import pytest
import reference_model
from small_model import EXPERTS, SmallModel
from workers import run_workers

SIZES = EXPERTS | {"num_layers": 1, "decoder_sparse_step": 1, "num_experts": 4}
ROWS = 5  # of a rank
LAYER = "model.layers.0."
HALF = (f"{LAYER}ffn_norm", f"{LAYER}feed_forward.")


def model_and_rows() -> tuple[SmallModel, np.ndarray, np.ndarray]:
    """The model, inputs of both ranks, and the slope of their outputs."""
    rng = np.random.default_rng(4)
    x, slope = (rng.standard_normal((2, ROWS, 32)).astype(np.float32) for _ in range(2))
    return SmallModel.random(2, **SIZES), x, slope


def own_part(name: str, array: np.ndarray, rank: int) -> np.ndarray:
    """Experts 0 and 1 are on rank 0, 2 and 3 on rank 1; all else is on both."""
    return array[2 * rank : 2 * rank + 2] if ".ffn." in name else array


def on_rank(world) -> tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]:
    """This rank's outputs, and the gradients of its inputs and of its part of the weights."""
    import mindspore
    from mindspore import Tensor, nn

    from mindrlhf.backend.comm.collectives import Collectives
    from mindrlhf.backend.comm.graph_collectives import ExpertParallel, TensorParallel
    from mindrlhf.backend.cpu import CPU
    from mindrlhf.models.experts import ExpertsHalf
    from mindrlhf.models.halves import Materials
    from mindrlhf.models.initialize import build_parameters

    class Weighted(nn.Cell):
        def __init__(self, half, slope):
            super().__init__(auto_prefix=False)
            self.half, self.slope = half, Tensor(slope)

        def construct(self, x):
            y = self.half.decode(x, ())
            return (y * self.slope).sum(), y

    mindspore.set_context(mode=mindspore.PYNATIVE_MODE, device_target="CPU")
    model, x, slope = model_and_rows()
    rank = world.rank
    specs = [spec for spec in model.specs if spec.name.startswith(HALF)]
    parameters = build_parameters(specs, lambda spec: own_part(spec.name, model.arrays[spec.name], rank))
    spread = ExpertParallel(Collectives(world), (0, 1))
    composed = CPU.operators().composed
    given = Materials(0, model.config, parameters, composed, TensorParallel(), adapters={}, spread=spread)
    cell = Weighted(ExpertsHalf("experts", given), slope[rank])
    weights = mindspore.ParameterTuple([parameters[spec.name] for spec in specs])
    compute = mindspore.value_and_grad(cell, grad_position=0, weights=weights, has_aux=True)
    (_, y), (d_x, d_weights) = compute(Tensor(x[rank]))
    named = {spec.name: gradient.asnumpy() for spec, gradient in zip(specs, d_weights, strict=True)}
    return y.asnumpy(), d_x.asnumpy(), named


def oracle(model: SmallModel, weights: dict[str, np.ndarray], x: np.ndarray) -> np.ndarray:
    """float64[rows, hidden] of one process that has all rows and all experts."""
    merged = model.merged(model.arrays | weights)
    x = x.reshape((-1, 32)).astype(np.float64)
    h = reference_model.rms_norm(x, weights[f"{LAYER}ffn_norm.weight"], model.config.rms_norm_eps)
    return x + reference_model.experts(model.config, merged, LAYER, h)


@pytest.mark.msrun
def test_rows_and_gradients_are_those_of_one_process():
    model, x, slope = model_and_rows()
    names = [spec.name for spec in model.specs if spec.name.startswith(HALF)]
    weights = {name: model.arrays[name].astype(np.float64) for name in names}
    ranks = run_workers(2, __file__, "on_rank")
    np.testing.assert_allclose(np.concatenate([y for y, _, _ in ranks]), oracle(model, weights, x), rtol=0, atol=1e-5)

    def along(change: dict[str, np.ndarray], d_x: np.ndarray, step: float = 1e-5) -> float:
        """Change of the sum of all outputs times their slope."""
        both = []
        for sign in (step, -step):
            moved = {name: array + sign * change.get(name, 0.0) for name, array in weights.items()}
            both.append((oracle(model, moved, x + sign * d_x) * slope.reshape((-1, 32))).sum())
        return (both[0] - both[1]) / (2 * step)

    rng = np.random.default_rng(9)
    for name in names:
        change = rng.standard_normal(weights[name].shape)
        found = sum(
            (gradients[name] * own_part(name, change, rank)).sum() for rank, (_, _, gradients) in enumerate(ranks)
        )
        np.testing.assert_allclose(found, along({name: change}, np.zeros(x.shape)), rtol=1e-4, err_msg=name)
    change = rng.standard_normal(x.shape)
    found = sum((d_x * change[rank]).sum() for rank, (_, d_x, _) in enumerate(ranks))
    np.testing.assert_allclose(found, along({}, change), rtol=1e-4)
