"""The data-parallel axis: shares of a step, and what one rank alone does."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mindrlhf.backend.comm.collectives import Collectives
from mindrlhf.backend.process.launch import World
from mindrlhf.errors import UserError
from mindrlhf.parallel.data_parallel import DataParallel
from mindrlhf.parallel.mesh import Mesh


def on_rank(rank, world_size, group=None) -> DataParallel:
    collectives = Collectives(World(rank, world_size, "CPU"))
    return DataParallel(collectives, range(world_size) if group is None else group)


@given(st.integers(1, 6), st.integers(0, 5))
def test_shares_are_blocks_that_make_up_the_step(size, each):
    items = [object() for _ in range(size * each)]
    shares = [on_rank(rank, size).share(items) for rank in range(size)]
    assert {len(share) for share in shares} == {each}
    assert [item for share in shares for item in share] == items


def test_a_step_that_does_not_divide_is_refused():
    """Of a recorded run, say, that is replayed on another number of workers: no rollout is dropped in silence."""
    with pytest.raises(UserError, match="7 groups, which 2 data-parallel workers do not divide"):
        on_rank(0, 2).share(list(range(7)))


def test_the_position_is_that_on_the_axis_not_in_the_world():
    mesh = Mesh(dp=3, tp=2)
    for rank in range(mesh.size):
        axis = on_rank(rank, mesh.size, mesh.group(rank, "dp"))
        assert (axis.size, axis.rank) == (3, mesh.coordinates(rank).dp)
        assert axis.share("abcdef") == list(("ab", "cd", "ef")[axis.rank])


def test_one_rank_alone():
    alone = on_rank(0, 1)
    values = np.arange(3.0)
    np.testing.assert_array_equal(alone.sum(values), values)
    assert alone.gather({"a": 1}) == [{"a": 1}]
    assert alone.share([1, 2, 3]) == [1, 2, 3]
