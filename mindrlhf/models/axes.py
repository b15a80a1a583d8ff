"""Axes of the mesh of ranks, by name."""

from typing import Literal, get_args

Axis = Literal["pp", "dp", "tp"]
AXES: tuple[Axis, ...] = get_args(Axis)
"""All axes, the outermost first: pipeline stages, data-parallel replicas, tensor-parallel shards."""
PIPELINE, DATA, TENSOR = AXES

DATA_AXES: tuple[Axis, ...] = (DATA,)
"""Axes whose ranks train on different rows."""
MODEL_AXES = tuple(axis for axis in AXES if axis not in DATA_AXES)
"""Axes whose ranks train one copy of the model together, on the same rows."""
