"""Checks, their findings, and tolerances.

A check is one computation that has answers; each part of it (an output, one parameter's gradient) is a finding, and a
row of the report.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from mindrlhf.backend.device import Device

if TYPE_CHECKING:
    from mindrlhf.backend.process.launch import World

Level = Literal["operators", "layer", "model", "step", "run"]
LEVELS: tuple[Level, ...] = ("operators", "layer", "model", "step", "run")

# Largest error of one operator, of a half of a layer, and of a model of a few layers, by dtype.
TOLERANCES: Mapping[str, Mapping[Level, float]] = {
    "float32": {"operators": 5e-6, "layer": 1e-5, "model": 3e-5},
    "float16": {"operators": 2e-3, "layer": 4e-3, "model": 1e-2},
    "bfloat16": {"operators": 8e-3, "layer": 2e-2, "model": 6e-2},
}
EXACT = 0.0
# Attention hardly sees what all keys share, so that the gradient of their bias is what is left of large terms.
CANCELLING, CANCELS = ".wk.bias", 8.0
PATIENCE_S = 600.0  # until the next finding of a check, and for each command that it runs
PEAK = 4.0  # a single number may be as many times further off, relative to the largest answer


@dataclass(frozen=True)
class Finding:
    """Error of one part of a check.

    part: "output", "gradient of weight". error: see `difference`; NaN fails. note: further words for the report.
    """

    part: str
    error: float
    tolerance: float
    note: str = ""

    @property
    def passed(self) -> bool:
        return self.error <= self.tolerance


@dataclass(frozen=True)
class Trial:
    """Surroundings of a check.

    device: the record of the device. folder: for files. world: the ranks that run it together; None for a check that
    starts processes of its own. fault: that these are to inject. patience_s: seconds for each of its commands.
    """

    device: Device
    folder: Path
    world: "World | None" = None
    fault: str | None = None
    patience_s: float = PATIENCE_S


@dataclass(frozen=True)
class Check:
    """Computation with answers.

    name: such as "rms_norm bfloat16". covers: operators of the backend's list that it computes. ranks: processes that
    run it together; 1 for a single one. alone: it starts processes of its own, and none may hold the device meanwhile.
    """

    name: str
    level: Level
    run: Callable[[Trial], Iterator[Finding]] = field(repr=False)
    covers: tuple[str, ...] = ()
    ranks: int = 1
    alone: bool = False


def tolerance_of(parameter: str, tolerance: float) -> float:
    """Return the tolerance of a parameter's gradient.

    tolerance: of the other parameters.
    """
    return tolerance * (CANCELS if parameter.endswith(CANCELLING) else 1.0)


def difference(found: np.ndarray, answer: np.ndarray) -> float:
    """Compute the relative error of an array.

    It is |found - answer| / |answer| in the Euclidean norm, or if that is larger, a quarter (1 / PEAK) of the largest
    single error over the largest answer. Where all answers are 0, it is the largest error itself.
    """
    found = np.asarray(found, np.float64)
    answer = np.asarray(answer, np.float64)
    if found.shape != answer.shape:
        return float("inf")
    if not answer.size:
        return 0.0
    errors = np.abs(found - answer)
    largest = np.abs(answer).max()
    if largest == 0:
        return float(errors.max())
    return float(max(np.linalg.norm(errors) / np.linalg.norm(answer), errors.max() / largest / PEAK))


def compared(part: str, found: np.ndarray, answer: np.ndarray, tolerance: float) -> Finding:
    """Compare one array; a wrong shape is said."""
    found = np.asarray(found)
    note = ""
    if found.shape != np.shape(answer):
        note = f"the shape is {list(found.shape)}, and should be {list(np.shape(answer))}"
    elif not np.isfinite(found).all():
        note = f"{np.count_nonzero(~np.isfinite(found))} of {found.size} numbers are not finite"
    return Finding(part, difference(found, answer), tolerance, note)


def same_bits(part: str, found: np.ndarray, answer: np.ndarray) -> Finding:
    """Compare arrays that have to be equal."""
    return compared(part, found, answer, EXACT)
