"""Grid of ranks: pipeline stages x data-parallel replicas x expert-parallel x tensor-parallel shards.

A new axis needs a name in `models.axes`, a length in `Mesh`, and an index in `Coordinates`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import NamedTuple

import numpy as np

from mindrlhf.configs.model_yaml import ModelYaml
from mindrlhf.models.axes import AXES, DATA_AXES, Axis

STAGE_AXES = AXES[1:]  # of the ranks of one pipeline stage


class Coordinates(NamedTuple):
    """Position of one rank: an index from 0 along each axis of `AXES`."""

    pp: int = 0
    dp: int = 0
    ep: int = 0
    tp: int = 0


@dataclass(frozen=True)
class Mesh:
    """Mesh of stages, replicas, shards of experts and tensor-parallel shards.

    pp, dp, ep, tp: their numbers. ranks: in ascending order; 0..size-1 by default. The rank at (pp, dp, ep, tp) is
    ranks[((pp*DP + dp)*EP + ep)*TP + tp]: tensor-parallel neighbours are adjacent, because they communicate most;
    pipeline stages are farthest apart. Groups are tuples of ranks in ascending order.
    """

    dp: int = 1
    pp: int = 1
    tp: int = 1
    ranks: tuple[int, ...] = ()
    ep: int = 1

    @classmethod
    def of_yaml(cls, yaml: ModelYaml) -> "Mesh":
        parallel = yaml.parallel
        return cls(
            dp=parallel.data_parallel // parallel.expert_parallel,
            pp=parallel.pipeline_stage,
            tp=parallel.model_parallel,
            ep=parallel.expert_parallel,
            ranks=tuple(yaml.ranks),
        )

    def __post_init__(self):
        for axis, length in self.lengths.items():
            if length < 1:
                raise ValueError(f"a mesh axis has at least one rank, but {axis} is {length}")
        object.__setattr__(self, "ranks", tuple(self.ranks) or tuple(range(self.size)))
        if list(self.ranks) != sorted(set(self.ranks)) or len(self.ranks) != self.size or self.ranks[0] < 0:
            raise ValueError(f"a mesh of {self.size} has as many ascending ranks, not {self.ranks}")

    @property
    def lengths(self) -> dict[Axis, int]:
        """Number of ranks along each axis, the outermost first."""
        return {axis: getattr(self, axis) for axis in AXES}

    @property
    def size(self) -> int:
        return prod(self.lengths.values())

    @property
    def replicas(self) -> int:
        """Number of copies of the model that train on different rows."""
        return prod(self.lengths[axis] for axis in DATA_AXES)

    @cached_property
    def _places(self) -> Mapping[int, Coordinates]:
        places = zip(self.ranks, np.ndindex(*self._shape), strict=True)
        return {rank: Coordinates(**dict(zip(AXES, place, strict=True))) for rank, place in places}

    @property
    def _shape(self) -> tuple[int, ...]:
        return tuple(self.lengths.values())

    def coordinates(self, rank: int) -> Coordinates:
        """Compute the position of `rank`. Raises ValueError outside of `ranks`."""
        if rank not in self._places:
            raise ValueError(f"rank {rank} is outside of a mesh of {self.size}")
        return self._places[rank]

    def group(self, rank: int, *axes: Axis) -> tuple[int, ...]:
        """List the ranks that differ from `rank` along `axes` only, itself included."""
        here = self.coordinates(rank)._asdict()
        grid = np.array(self.ranks).reshape(self._shape)
        return tuple(grid[tuple(slice(None) if axis in axes else here[axis] for axis in AXES)].ravel().tolist())
