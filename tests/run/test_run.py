"""A phase that changes or moves weights leaves a checkpoint alone that is still being written."""

import pytest

from mindrlhf.backend.comm.collectives import Collectives
from mindrlhf.backend.cpu import CPU
from mindrlhf.backend.process.launch import World
from mindrlhf.checkpoint.store import CheckpointStore
from mindrlhf.memory.residency import Residency, moving_roles
from mindrlhf.run.run import Run

PHASES = ("step", "gen", "reward", "old_log_prob", "adv", "update_actor", "report")


@pytest.mark.parametrize(
    ("swap", "settling"),
    [(False, ("update_actor",)), (True, ("gen", "old_log_prob", "update_actor"))],
)
def test_arrays_stay_until_they_are_written_or_copied(tmp_path, swap, settling):
    run, order = object.__new__(Run), []
    run.collectives = Collectives(World(rank=0, size=1, device_target="CPU"))
    run.residency = Residency(lambda parameters: None, moving_roles(swap, CPU))
    run.residency.enter = order.append
    run._store = CheckpointStore(tmp_path, 0, (0,), "token")
    run._store.settle = lambda: order.append("settle")
    for phase in PHASES:
        run._enter(phase)
    assert order == [each for phase in PHASES for each in (("settle", phase) if phase in settling else (phase,))]
