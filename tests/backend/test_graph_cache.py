"""Graphs on disk: which of them are the same, and that what comes back computes what was kept."""

import shutil
import subprocess
import sys
from pathlib import Path

import mindspore
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn, ops

from mindrlhf.backend.compile import graph_cache
from mindrlhf.backend.compile.graph import Graph, kept_graphs
from mindrlhf.backend.compile.graph_cache import GraphCache
from mindrlhf.user_functions import load_function

X = np.arange(6, dtype=np.float32).reshape(2, 3)


class Inner(nn.Cell):
    def __init__(self, weight, factor):
        super().__init__(auto_prefix=False)
        self.weight, self.factor = weight, factor

    def construct(self, x):
        return x * self.weight * self.factor


class Net(Graph):
    def __init__(self, factor=2.0, name="w", value=1.0, shape=(3,), kind="net", constant=1):
        super().__init__(kind, factor, constant)
        self.inner = Inner(Parameter(Tensor(np.full(shape, value, np.float32)), name=name), factor)

    def construct(self, x):
        return self.inner(x) + 1.0


def key(folder, settings="", rank=0, shapes=((2, 3),), **change) -> str:
    return GraphCache(folder, rank, lambda name: settings).key(Net(**change), shapes)


def test_graphs_made_alike_have_one_key(tmp_path):
    assert key(tmp_path) == key(tmp_path)
    assert key(tmp_path, value=1.0) == key(tmp_path, value=5.0), "the numbers in a parameter are read at run time"


@pytest.mark.parametrize(
    "change",
    [
        {"settings": "temperature 0.5"},
        {"rank": 1},
        {"shapes": ((4, 3),)},
        {"kind": "another"},
        {"constant": 2},
        {"name": "v"},
        {"shape": (1,)},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_change_is_another_key(tmp_path, change):
    assert key(tmp_path, **change) != key(tmp_path)


def test_other_code_of_the_package_is_another_key(tmp_path, monkeypatch):
    before = key(tmp_path)
    package = tmp_path / "package"
    package.mkdir()
    (package / "loss.py").write_text("LIMIT = 1")
    monkeypatch.setattr(graph_cache, "PACKAGE", package)
    assert key(tmp_path) != before


def test_another_content_of_a_users_loss_is_another_key(tmp_path):
    path = tmp_path / "loss.py"
    keys = []
    for content in ("def mine(): return 1", "def mine(): return 2"):
        path.write_text(content)
        sys.modules.pop(str(path), None)
        load_function("loss", f"{path}:mine")
        keys.append(key(tmp_path))
    sys.modules.pop(str(path))
    assert keys[0] != keys[1]


def test_compiling_changes_nothing(tmp_path):
    mindspore.set_context(mode=mindspore.GRAPH_MODE, device_target="CPU")
    net, cache = Net(), GraphCache(tmp_path, 0)
    before = cache.key(net, ())
    net(Tensor(X))
    assert cache.key(net, ()) == before


class Borrowing(Graph):
    """Reads a parameter that is none of its own: a graph from the cache would not find it."""

    def __init__(self, inner):
        super().__init__("borrowing")
        self.run = ops.value_and_grad(inner, 0)

    def construct(self, x):
        return self.run(x)[0]


@pytest.fixture
def started(tmp_path, root):
    """Runs of a process of its own that compiles nets in some order: what they gave, and the cache's counts."""

    def run(order, *script):
        command = [sys.executable, *(script or [__file__]), str(tmp_path / "graphs"), order]
        done = subprocess.run(command, capture_output=True, text=True, cwd=root)
        assert done.returncode == 0, done.stderr
        *values, counts = done.stdout.splitlines()[-len(order) - 1 :]
        return dict(zip(order, values, strict=True)), counts.split()

    run.folder = tmp_path / "graphs"
    return run


NETS = {"a": {}, "b": {"factor": 3.0}, "c": {"value": 7.0}}


@pytest.mark.slow
def test_other_processes_find_their_graphs(started, capsys):
    """In another order, with other numbers in the parameters, without a main script, and after a file was damaged."""
    expected = {name: str(Net(**change)(Tensor(X)).asnumpy().tolist()) for name, change in NETS.items()}
    first, counts = started("ab")
    assert first == {name: expected[name] for name in "ab"}
    assert counts == ["0", "2", "0"]
    command = f"import mindspore, runpy; runpy.run_path({__file__!r}, run_name='__main__')"
    second, counts = started("bca", "-c", command)
    assert second == expected
    assert counts == ["3", "0", "0"]
    for path in started.folder.iterdir():
        path.write_bytes(path.read_bytes()[:-100])
    main(str(started.folder), "ba")
    *third, counts = capsys.readouterr().out.splitlines()[-3:]
    assert third == [expected[name] for name in "ba"]
    assert counts == "0 2 0"


def test_a_parameter_of_somebody_else_is_not_kept(tmp_path, capsys):
    main(str(tmp_path), "x")
    values, counts = capsys.readouterr().out.splitlines()[-2:]
    assert counts == "0 0 1"
    assert values == str((X * 2).tolist())


def test_without_room_graphs_are_built_without_it(tmp_path, monkeypatch, caplog):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(graph_cache.shutil, "disk_usage", lambda folder: usage._replace(free=2**20))
    with kept_graphs(GraphCache(tmp_path, 0)) as cache:
        for change in NETS.values():
            expected = X * change.get("factor", 2.0) * change.get("value", 1.0) + 1
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
