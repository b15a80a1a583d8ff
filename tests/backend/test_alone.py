"""Collectives of a rank whose job has no other processes: shapes of the job, without waiting."""

import numpy as np
import pytest
from mindspore import Tensor

from mindrlhf.backend.comm.alone import AbsentPeers, AloneCollectives
from mindrlhf.backend.comm.graph_collectives import StackOverGroup, graph_all_reduce
from mindrlhf.backend.process.launch import launch_alone


@pytest.fixture(scope="module")
def alone():
    """Rank 2 of 4."""
    return AloneCollectives(launch_alone("CPU", 2, 4))


def test_results_have_the_shapes_of_all_ranks(alone):
    array = np.arange(6, dtype=np.int32).reshape((2, 3))
    assert alone.all_gather(array).shape == (4, 2, 3)
    assert alone.all_gather(array, (1, 2)).dtype == np.int32
    np.testing.assert_array_equal(alone.all_reduce_max(array), array)
    assert alone.all_gather_object({"a": 1}, (0, 2, 3)) == [{"a": 1}] * 3
    assert alone.broadcast_object("own", 0) == "own"
    assert alone.over((2, 3)).all_gather(array).shape == (2, 2, 3)
    alone.barrier()


def test_a_group_without_the_rank_is_refused(alone):
    with pytest.raises(ValueError, match="rank 2 is not in the group"):
        alone.all_gather(np.zeros(1), (0, 1))


def test_absent_peers_send_zeros(alone):
    peers = alone.peers()
    peers.send(np.ones(3), 0)
    assert peers.receive(np.ones(3), 1).tolist() == [0, 0, 0]
    incoming = [np.ones(2), np.ones((1, 2), np.int8)]
    AbsentPeers().exchange({0: [np.ones(5)]}, {0: incoming[:1], 3: incoming[1:]})
    assert not any(array.any() for array in incoming)


def test_a_sum_in_a_graph_is_the_rank_s_own_term(alone):
    x = np.array([[1.0, -2.0]], np.float32)
    np.testing.assert_array_equal(graph_all_reduce(alone, (0, 2))(Tensor(x)).asnumpy(), x)
    stacked = StackOverGroup(alone, (1, 2, 3))(Tensor(x)).asnumpy()
    np.testing.assert_array_equal(stacked, np.stack([0 * x, x, 0 * x]))
