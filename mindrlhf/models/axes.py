"""Axes of the mesh of ranks, by name."""

from typing import Literal, get_args

Axis = Literal["pp", "dp", "ep", "tp"]
AXES: tuple[Axis, ...] = get_args(Axis)
"""All axes, the outermost first.

These are pipeline stages, data-parallel replicas, expert-parallel shards, and tensor-parallel shards. Ranks along `ep`
are data-parallel ranks too, among which experts are spread.
"""
PIPELINE, DATA, EXPERT, TENSOR = AXES

DATA_AXES: tuple[Axis, ...] = (DATA, EXPERT)
"""Axes whose ranks train on different rows."""
MODEL_AXES = tuple(axis for axis in AXES if axis not in DATA_AXES)
"""Axes whose ranks train one copy of the model together, on the same rows."""
COPY_AXES = tuple(axis for axis in AXES if axis != DATA)
"""Axes whose ranks hold one copy of the model together."""
