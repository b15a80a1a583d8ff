"""Moments of an optimizer (`optimizer.state`), and random numbers that round them."""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from mindspore import Parameter, ParameterTuple, Tensor

from mindrlhf import backend
from mindrlhf.backend.memory import zero_parameter
from mindrlhf.checkpoint.stored_tensor import encode as round_numbers
from mindrlhf.models.parameters import ParameterSpec
from mindrlhf.optimizer_state import DTYPES, SCALES, State, encode, form_of, scales_shape
from mindrlhf.parallel.layout import Shape, Slices
from mindrlhf.random_numbers import fraction

# Counters of the random numbers, beside the seed and the update.
ROWS, COLUMNS = 1, 2


class Moments:
    """Both moments of parameters, zero at first.

    first, second: one parameter each. scales: of the codes of first and second moments; None for other forms. forms: of
    each parameter's moments.
    """

    def __init__(self, state: State, parameters: Sequence[Parameter]):
        self.forms = [form_of(state, parameter.shape) for parameter in parameters]
        pairs = list(zip(self.forms, parameters, strict=True))
        self.first, self.second = (
            ParameterTuple([_zeros(prefix, one, form, DTYPES[moment]) for form, one in pairs])
            for prefix, moment in (("exp_avg", "first"), ("exp_avg_sq", "second"))
        )
        self.scales = [[_scales(prefix, one, form) for form, one in pairs] for prefix in ("exp_avg", "exp_avg_sq")]

    def arrays(self, index: int) -> list[Parameter]:
        """List all arrays of a parameter's moments."""
        scales = (kept[index] for kept in self.scales)
        return [self.first[index], self.second[index], *(one for one in scales if one is not None)]

    def named(self, names: Sequence[str]) -> list[dict[str, Parameter]]:
        """Map names to both moments, with their scales under names of their own."""
        found = []
        for moments, scales in zip((self.first, self.second), self.scales, strict=True):
            pairs = list(zip(names, moments, scales, strict=True))
            kept = {f"{name}{SCALES}": scale for name, _, scale in pairs if scale is not None}
            found.append({name: moment for name, moment, _ in pairs} | kept)
        return found


def _zeros(prefix: str, parameter: Parameter, form: State, code: str) -> Parameter:
    dtype = code if form == "int8" else form
    return zero_parameter(f"{prefix}.{parameter.name}", parameter.shape, dtype)


def _scales(prefix: str, parameter: Parameter, form: State) -> Parameter | None:
    if form != "int8":
        return None
    return zero_parameter(f"{prefix}.{parameter.name}{SCALES}", scales_shape(parameter.shape))


@dataclass(frozen=True)
class Place:
    """Place of this rank's part of a parameter in the whole.

    name: in the parameter table. part: its slices. shape: of the whole parameter.
    """

    name: str
    part: Slices
    shape: Shape

    @classmethod
    def whole(cls, spec: ParameterSpec) -> "Place":
        return cls(spec.name, tuple(slice(0, size) for size in spec.shape), spec.shape)

    @property
    def column(self) -> int:
        """First column of the part in the whole."""
        return self.part[-1].start

    @property
    def rows(self) -> np.ndarray:
        """Numbers of the part's rows among those of the whole: int64."""
        found = np.zeros(1, np.int64)
        for part, size in zip(self.part[:-1], self.shape[:-1], strict=True):
            found = (found[:, None] * size + np.arange(part.start, part.stop)).ravel()
        return found


class Draws:
    """Random numbers that round the moments of some parameters.

    They follow from seed, update, parameter, row and column, so that no cut of rows over ranks, blocks or threads, and
    no restart, changes a bit. The number of a place is the sum of its row's and its column's, without what is before
    the point: uniform, and independent of that of any other place.
    """

    def __init__(self, seed: int, places: Sequence[Place]):
        self._seed = seed
        self._names = np.concatenate([np.full(len(one.rows), zlib.crc32(one.name.encode())) for one in places])
        self._rows = np.concatenate([one.rows for one in places])
        self._width = max(one.part[-1].stop for one in places)

    def __call__(self, update: int) -> tuple[Tensor, Tensor]:
        """Draw for rows float32[rows], and for columns of both moments float32[2, columns]."""
        rows = fraction(self._seed, update, ROWS, self._names, self._rows)
        columns = fraction(self._seed, update, COLUMNS, np.arange(2)[:, None], np.arange(self._width))
        return Tensor(rows), Tensor(columns)


def write_moment(moment: Parameter, scales: Parameter | None, values: np.ndarray) -> None:
    """Write float32 numbers into a moment of any form, rounded to the nearest."""
    dtype = backend.dtype_of(moment)
    if scales is not None:
        codes, found = encode(values, "first" if dtype == DTYPES["first"] else "second")
        backend.write(moment, codes)
        backend.write(scales, found)
    elif str(dtype) == "bfloat16":
        bits = round_numbers(values, "bfloat16", moment.name)
        backend.write(moment, bits.view(dtype))
    else:
        backend.write(moment, values)
