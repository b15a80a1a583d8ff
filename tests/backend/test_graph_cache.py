"""Graphs on disk: which of them are the same, and that what comes back computes what was kept."""

import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import mindspore
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn, ops

from mindrlhf.backend.compile import graph_cache
from mindrlhf.backend.compile.fingerprint import Unknown, fingerprint
from mindrlhf.backend.compile.graph import Graph, kept_graphs
from mindrlhf.backend.compile.graph_cache import GraphCache

X = np.arange(6, dtype=np.float32).reshape(2, 3)


SCALE = 1.0


def scaled(x):
    return x * SCALE


def shifted(x, by=1.0):
    return x + by


class Inner(nn.Cell):
    def __init__(self, weight, factor):
        super().__init__(auto_prefix=False)
        self.weight, self.factor = weight, factor

    def construct(self, x):
        return x * self.weight * self.factor


class Net(Graph):
    def __init__(self, factor=2.0, name="w", value=1.0, shape=(3,), by=1.0, table=(1, 2, 3), call=shifted):
        super().__init__()
        weight = Parameter(Tensor(np.full(shape, value, np.float32)), name=name)
        self.inner = Inner(weight, factor)
        self.table = Tensor(np.array(table, np.float32))
        self.call = partial(call, by=by) if by != 1.0 else call
        self.add = ops.Add()

    def construct(self, x):
        return self.add(self.call(self.inner(x)), self.table)


def test_graphs_made_alike_are_the_same():
    assert fingerprint(Net()) == fingerprint(Net())
    assert fingerprint(Net(value=1.0)) == fingerprint(Net(value=5.0)), "the numbers in a parameter are read at run time"


@pytest.mark.parametrize(
    "change",
    [
        {"factor": 2.5},
        {"factor": 2},
        {"name": "v"},
        {"shape": (1,)},
        {"by": 3.0},
        {"table": (1, 2, 4)},
        {"call": lambda x: x},
    ],
    ids=lambda change: next(iter(change)),
)
def test_what_differs_is_told_apart(change):
    assert fingerprint(Net(**change)) != fingerprint(Net())


def test_what_functions_close_over_is_told_apart():
    def closing(value):
        return lambda x: x * value

    one, same, other = (fingerprint(Net(call=closing(value))) for value in (1.5, 1.5, 2.5))
    assert one == same != other


def test_functions_of_one_line_are_told_apart():
    calls = [lambda x: x + 1.0, lambda x: x + 2.0, lambda x: x - 1.0]
    assert len({fingerprint(Net(call=call)) for call in calls}) == 3


def test_what_a_module_has_from_elsewhere_is_told_apart(monkeypatch):
    before = fingerprint(Net(call=scaled))
    monkeypatch.setitem(globals(), "SCALE", 4.0)
    assert fingerprint(Net(call=scaled)) != before


def test_compiling_changes_nothing():
    mindspore.set_context(mode=mindspore.GRAPH_MODE, device_target="CPU")
    net = Net()
    before = fingerprint(net)
    net(Tensor(X))
    assert fingerprint(net) == before


def test_what_nobody_knows_is_not_kept():
    net = Net()
    net.strange = iter(())
    with pytest.raises(Unknown, match="iterator"):
        fingerprint(net)


class Borrowing(Graph):
    """Reads a parameter that is none of its own: a graph from the cache would not find it."""

    def __init__(self, inner):
        super().__init__()
        self.run = ops.value_and_grad(inner, 0)

    def construct(self, x):
        return self.run(x)[0]


@pytest.fixture
def started(tmp_path, root):
    """Runs of a process of its own that compiles nets in some order: what they gave, and the cache's counts."""

    def run(order):
        command = [sys.executable, str(Path(__file__)), str(tmp_path / "graphs"), order]
        done = subprocess.run(command, capture_output=True, text=True, cwd=root)
        assert done.returncode == 0, done.stderr
        *values, counts = done.stdout.splitlines()[-len(order) - 1 :]
        return dict(zip(order, values, strict=True)), counts.split()

    run.folder = tmp_path / "graphs"
    return run


NETS = {"a": {}, "b": {"factor": 3.0}, "c": {"value": 7.0}}


def test_other_processes_find_their_graphs(started):
    """In another order, with other numbers in the parameters, and after a file was damaged."""
    expected = {name: str(Net(**change)(Tensor(X)).asnumpy().tolist()) for name, change in NETS.items()}
    first, counts = started("ab")
    assert first == {name: expected[name] for name in "ab"}
    assert counts == ["0", "2", "0"]
    second, counts = started("bca")
    assert second == expected
    assert counts == ["3", "0", "0"]
    for path in started.folder.iterdir():
        path.write_bytes(path.read_bytes()[:-100])
    third, counts = started("ba")
    assert third == {name: expected[name] for name in "ab"}
    assert counts == ["0", "2", "0"]


def test_a_parameter_of_somebody_else_is_not_kept(started):
    values, counts = started("x")
    assert counts == ["0", "0", "1"]
    assert values["x"] == str((X * 2).tolist())


def test_without_room_graphs_are_built_without_it(tmp_path, monkeypatch, caplog):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(graph_cache.shutil, "disk_usage", lambda folder: usage._replace(free=2**20))
    with kept_graphs(GraphCache(tmp_path, 0)) as cache:
        for change in NETS.values():
            expected = X * change.get("factor", 2.0) * change.get("value", 1.0) + 1 + np.array([1, 2, 3])
            np.testing.assert_array_equal(Net(**change)(Tensor(X)).asnumpy(), expected)
    assert (cache.loaded, cache.stored, cache.left_out) == (0, 0, 3)
    assert [record.getMessage().count("1 MiB left") for record in caplog.records] == [1], "said once"
    assert not any(tmp_path.iterdir())


def test_the_oldest_graphs_go(tmp_path):
    cache = GraphCache(tmp_path, 0, limit=250)
    for number in range(4):
        assert cache._write(f"{number}", bytes([number]) * 100)
    assert sorted(path.name[0] for path in tmp_path.iterdir()) == ["2", "3"]
    assert cache._read("3") == bytes([3]) * 100
    assert cache._read("0") is None


def main(folder: str, order: str) -> None:
    mindspore.set_context(mode=mindspore.GRAPH_MODE, device_target="CPU")
    with kept_graphs(GraphCache(Path(folder), 0)) as cache:
        for name in order:
            net = Borrowing(Inner(Parameter(Tensor(np.ones(3, np.float32)), name="w"), 2.0)) if name == "x" else None
            print((net or Net(**NETS[name]))(Tensor(X)).asnumpy().tolist())
    print(cache.loaded, cache.stored, cache.left_out)


if __name__ == "__main__":
    main(*sys.argv[1:])
