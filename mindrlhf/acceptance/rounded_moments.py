"""Check of updates with moments in bfloat16 and in 8-bit codes."""

from collections.abc import Iterator

import mindspore
import numpy as np
from mindspore import Parameter, ParameterTuple, Tensor

from mindrlhf import backend
from mindrlhf.acceptance.checks import TOLERANCES, Finding, Trial, compared, same_bits
from mindrlhf.acceptance.graphs import arrays_of, parameter
from mindrlhf.acceptance.inputs import numbers
from mindrlhf.backend.operators import Operators
from mindrlhf.checkpoint.stored_tensor import decode as widened
from mindrlhf.checkpoint.stored_tensor import encode as rounded
from mindrlhf.optimizer_state import decode, encode
from mindrlhf.training.moments import Draws, Place
from mindrlhf.training.optimizer import RoundedApply

# Halves, so that the new moments are exact, and rounded alike everywhere.
RATE, BETA1, BETA2, EPS, DECAY, FACTOR = 0.01, 0.5, 0.5, 1e-3, 0.1, 0.5
DECAYS = [True, False]
SHAPES = [(4, 192), (2, 3, 64)]
ROWS = [(0, 4), (1, 3)]  # of the second only two rows of the gradient belong to the parameter
UPDATE = 3


def check_rounded_adamw(dtype: str, trial: Trial) -> Iterator[Finding]:
    """Check `rounded_adamw`.

    Weights, moments and zeroed gradients, in both forms, with decay and without, whole and of some rows.
    """
    used = trial.device.operators(dtype)
    for state in ("bfloat16", "int8"):
        yield from _check_form(state, used)


def _check_form(state: str, used: Operators) -> Iterator[Finding]:
    drawn = {
        kind: [numbers(f"{state} {kind} {i}", *one) for i, one in enumerate(SHAPES)] for kind in ("weight", "m", "v")
    }
    slopes = [numbers(f"{state} gradient {i}", end + first, *shape[1:]) for i, ((first, end), shape) in _places()]
    before = {"m": drawn["m"], "v": [array**2 for array in drawn["v"]]}
    stored = {kind: [_stored(state, kind, array) for array in arrays] for kind, arrays in before.items()}
    held = {kind: [_held(f"{kind}.{i}", one) for i, one in enumerate(arrays)] for kind, arrays in stored.items()}
    weights, gradients = (
        ParameterTuple([parameter(f"acceptance.{kind}.{i}", array) for i, array in enumerate(arrays)])
        for kind, arrays in (("weight", drawn["weight"]), ("gradient", slopes))
    )
    scales = [one[1] for kind in ("m", "v") for one in held[kind] if len(one) > 1]
    draws = Draws(1, [Place(f"w{i}", tuple(slice(0, size) for size in one), one) for i, one in enumerate(SHAPES)])
    graph = RoundedApply(
        parameters=weights,
        gradients=gradients,
        first=ParameterTuple([one[0] for one in held["m"]]),
        second=ParameterTuple([one[0] for one in held["v"]]),
        scales=ParameterTuple(scales) if scales else (),
        decays=DECAYS,
        rows=ROWS,
        columns=[0] * len(SHAPES),
        adamw=used.rounded_adamw,
    )
    given = draws(UPDATE)
    rows, columns = (one.asnumpy() for one in given)
    scalars = (RATE, BETA1, BETA2, EPS, DECAY, FACTOR)
    arrays_of(graph(*given, *(Tensor(np.float32(number)) for number in scalars)))
    tolerance = TOLERANCES["float32"]["operators"]
    for i, ((first, end), shape) in _places():
        slope = slopes[i][first:end].astype(np.float64) * FACTOR
        one = BETA1 * _values(state, stored["m"][i]) + (1 - BETA1) * slope
        two = BETA2 * _values(state, stored["v"][i]) + (1 - BETA2) * slope**2
        weight = drawn["weight"][i].astype(np.float64)
        weight = weight - RATE * (one / (np.sqrt(two) + EPS) + DECAY * DECAYS[i] * weight)
        yield compared(f"weight {i}, {state}", backend.read(weights[i]), weight, tolerance)
        count = slope.size // shape[-1]
        own, rows = rows[:count, None], rows[count:]
        for kind, expected, column in (("m", one, columns[0]), ("v", two, columns[1])):
            uniform = ((own + column[: shape[-1]]) % np.float32(1)).reshape(shape)
            answer = _values(state, _stored(state, kind, expected.astype(np.float32), uniform))
            found = _values(state, tuple(backend.read(array) for array in held[kind][i]))
            yield compared(f"{kind} {i}, {state}", found, answer, tolerance)
        yield same_bits(f"gradient {i}, {state}", backend.read(gradients[i]), np.zeros(slopes[i].shape))


def _places() -> Iterator[tuple[int, tuple[tuple[int, int], tuple[int, ...]]]]:
    """List the parameters' numbers, with their rows of the gradients and their shapes."""
    return enumerate(zip(ROWS, SHAPES, strict=True))


def _stored(state: str, kind: str, array: np.ndarray, uniform: np.ndarray | float = 0.5) -> tuple[np.ndarray, ...]:
    """Round a moment to its form: bits of bfloat16, or codes and scales."""
    if state == "int8":
        return encode(array, "first" if kind == "m" else "second", uniform)
    lower = np.ascontiguousarray(array, np.float32).view(np.uint32)
    share = (lower & 0xFFFF) / np.float32(1 << 16)
    return (((lower >> 16) + (uniform < share)).astype(np.uint16),)


def _values(state: str, stored: tuple[np.ndarray, ...]) -> np.ndarray:
    """Return the numbers of a moment in its form: float64."""
    if state == "int8":
        return decode(*stored).astype(np.float64)
    bits = stored[0] if stored[0].dtype == np.uint16 else rounded(stored[0], "bfloat16", "moment")
    return widened(bits, "bfloat16").reshape(bits.shape).astype(np.float64)


def _held(name: str, stored: tuple[np.ndarray, ...]) -> tuple[Parameter, ...]:
    """Make parameters of a moment in its form."""
    first, *scales = stored
    tensor = Tensor(widened(first, "bfloat16"), mindspore.bfloat16) if first.dtype == np.uint16 else Tensor(first)
    moment = Parameter(tensor, name=f"acceptance.{name}", requires_grad=False)
    return (moment, *(parameter(f"acceptance.{name}.scales", array) for array in scales))
