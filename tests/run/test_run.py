"""A phase that changes or moves weights leaves a checkpoint alone that is still being written."""

from types import SimpleNamespace

import pytest

from mindrlhf.backend.comm.collectives import Collectives
from mindrlhf.backend.cpu import CPU
from mindrlhf.backend.process.launch import World
from mindrlhf.memory.residency import Residency, moving_roles
from mindrlhf.run.run import Run

PHASES = ("step", "gen", "reward", "old_log_prob", "adv", "update_actor", "report")


@pytest.mark.parametrize(
    ("swap", "settling"),
    [(False, ("update_actor",)), (True, ("gen", "old_log_prob", "update_actor"))],
)
def test_arrays_stay_until_they_are_written_or_copied(swap, settling):
    run, order = object.__new__(Run), []
    run.collectives = Collectives(World(rank=0, size=1, device_target="CPU"))
    residency = Residency(lambda parameters: None, moving_roles(swap, CPU))
    run.residency = SimpleNamespace(disturbs=residency.disturbs, enter=order.append)
    run._store = SimpleNamespace(settle=lambda: order.append("settle"))
    for phase in PHASES:
        run._enter(phase)
    assert order == [each for phase in PHASES for each in (("settle", phase) if phase in settling else (phase,))]
