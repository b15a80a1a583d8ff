"""Arrays of a checkpoint are read in place while they are written, and copied only when they are about to change."""

import threading
from contextlib import closing

import numpy as np
import pytest
from sharded_files import layout_of

from mindrlhf.checkpoint.snapshot import Snapshot
from mindrlhf.checkpoint.training_state import ShardGroup

NAMES = ("first", "second", "third", "fourth")


class Watched(np.ndarray):
    """An array that says when it is copied."""

    copied = staticmethod(lambda array: None)

    def copy(self, order="C"):
        self.copied(float(self[0]))
        return np.array(self, order=order)


@pytest.fixture
def arrays():
    return [np.full(3, number, np.float32).view(Watched) for number in range(len(NAMES))]


@pytest.fixture
def snapshot(arrays):
    """Two arrays of each of two kinds."""
    kinds = {"model": slice(0, 2), "exp_avg": slice(2, 4)}
    return Snapshot(
        {kind: ShardGroup(layout_of(), dict(zip(NAMES[own], arrays[own], strict=True))) for kind, own in kinds.items()}
    )


def test_arrays_that_are_written_in_time_are_not_copied(snapshot, arrays, monkeypatch):
    monkeypatch.setattr(Watched, "copied", staticmethod(lambda number: pytest.fail(f"copied {number}")))
    taken = [*snapshot.take("model"), *snapshot.take("exp_avg")]
    assert all(one is other for one, other in zip(taken, arrays, strict=True))
    snapshot.settle()


def test_arrays_that_are_not_written_yet_are_copied(snapshot, arrays):
    snapshot.settle()
    for array in arrays:
        array += 10
    assert [array.tolist() for kind in ("model", "exp_avg") for array in snapshot.take(kind)] == [
        [number] * 3 for number in range(4)
    ]


def test_the_owner_waits_for_the_array_that_is_being_written(snapshot, arrays, monkeypatch):
    """From the end on it copies those that nobody has taken; the writer meets it in the middle."""
    copied, met = [], threading.Event()

    def seen(number):
        copied.append(number)
        if number == 2:
            met.set()

    monkeypatch.setattr(Watched, "copied", staticmethod(seen))
    model = snapshot.take("model")
    next(model)
    assert next(model) is arrays[1]
    owner = threading.Thread(target=snapshot.settle)
    owner.start()
    assert met.wait(60)
    assert owner.is_alive(), "the second array is in the writer's hands"
    assert list(model) == []
    owner.join(60)
    assert not owner.is_alive()
    assert copied == [3, 2]
    assert [array.tolist() for array in snapshot.take("exp_avg")] == [[2] * 3, [3] * 3]


def test_a_writer_that_fails_holds_nothing(snapshot, monkeypatch):
    copied = []
    monkeypatch.setattr(Watched, "copied", staticmethod(copied.append))
    with closing(snapshot.take("model")) as model:
        next(model)
    snapshot.settle()
    assert copied == [3, 2, 1, 0]
