"""Training checkpoints: what is written, what stays when writing fails or a process dies, and which ones are kept."""

import errno
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from bad_places import file_size_limit, ordinary_user
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from layouts import full_arrays, layout_pairs, model_configs, model_layouts, shards_of
from sharded_files import TIED, layout_of
from training_states import KINDS, arrays_of, assert_holds, read_all, save, save_step, states, stores

from mindrlhf.checkpoint import store as store_module
from mindrlhf.checkpoint.resume import Checkpoint, choose, locate
from mindrlhf.checkpoint.training_state import ShardGroup, TrainingState, layout_from_json, layout_to_json
from mindrlhf.errors import UserError
from mindrlhf.files.atomic import clean

MESHES = [{}, {"tp": 2}, {"dp": 2}, {"dp": 2, "tp": 2}, {"tp": 2, "pp": 2}, {"dp": 2, "tp": 2, "pp": 2}, {"tp": 4}]


def save_and_wait(store, state) -> None:
    store.save(state)
    store.wait()


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


# --- layouts ---


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_layout_survives_json(data):
    layout = data.draw(model_layouts(data.draw(model_configs())))
    assert layout_from_json(json.loads(json.dumps(layout_to_json(layout)))) == layout


@settings(max_examples=60, deadline=None)
@given(layout_pairs())
def test_every_distinct_part_is_written_once(pair):
    for layout in pair:
        mine = layout.writers
        for name in layout.placements:
            for part, ranks in layout.holders(name).items():
                assert sum(name in mine[rank] for rank in ranks) == 1, (name, part)
            assert {rank for rank in range(layout.size) if name in mine[rank]} <= {
                rank for ranks in layout.holders(name).values() for rank in ranks
            }


def test_replicas_share_the_writing():
    layout = layout_of(dp=4)
    written = [sum(np.prod(layout.shape(rank, name)) for name in layout.writers[rank]) for rank in range(4)]
    assert max(written) < 0.4 * sum(written)


# --- writing and reading ---


@pytest.mark.parametrize("mesh", [pytest.param(m, marks=[pytest.mark.slow][: i % 5]) for i, m in enumerate(MESHES)])
def test_any_layout_is_read_in_any_other(tmp_path, mesh):
    folder = save_step(tmp_path, 7, **mesh)
    checkpoint = assert_holds(folder, 7)
    assert names(tmp_path) == ["latest", "step_000007"]
    assert not list(folder.rglob(".*"))
    assert list(folder.rglob("manifest.json")) == [folder / "manifest.json"]
    for other in MESHES:
        layout = layout_of(**other)
        for kind, arrays in arrays_of(7).items():
            for found, expected in zip(read_all(checkpoint, layout, kind), shards_of(layout, arrays), strict=True):
                assert found.keys() == expected.keys()
                assert all(found[name].tobytes() == array.tobytes() for name, array in expected.items())


def test_a_tied_model_on_two_stages(tmp_path):
    assert_holds(save_step(tmp_path, 1, model=TIED, pp=2, tp=2), 1, TIED)


def test_what_is_no_number_survives(tmp_path):
    (state,) = states(1)
    odd = np.array([np.nan, -np.nan, np.inf, -0.0, 1e-45, 3.4e38], np.float32)
    array = state.groups["exp_avg"].shards["model.norm_out.weight"]
    array[: len(odd)] = odd
    save(stores(tmp_path), [state])
    ((_, checkpoint),) = [(path, Checkpoint.open(path)) for path in locate(tmp_path)]
    (found,) = read_all(checkpoint, layout_of(), "exp_avg")
    assert found["model.norm_out.weight"].tobytes() == array.tobytes()


def test_asynchronous_writing_lets_arrays_change(tmp_path, monkeypatch):
    """They change as soon as `settle` returns, while the thread is held up; the file has what was saved."""
    may_write = threading.Event()
    write = store_module.write_safetensors
    monkeypatch.setattr(store_module, "write_safetensors", lambda *a: (may_write.wait(10), write(*a)))
    (state,) = states(3)
    (store,) = stores(tmp_path, asynchronous=True)
    store.save(state)
    store.settle()
    for group in state.groups.values():
        for array in group.shards.values():
            array += 1
    assert names(tmp_path) == [] or not (tmp_path / "step_000003").exists()
    may_write.set()
    store.wait()
    assert_holds(tmp_path / "step_000003", 3)


def test_the_disk_is_waited_for_once_all_arrays_are_read(tmp_path, monkeypatch):
    """Arrays that change while the thread waits for the disk the first time have been read: nothing is copied."""
    waits, disk = threading.Event(), threading.Event()
    sync = store_module.sync
    monkeypatch.setattr(store_module, "sync", lambda path: (waits.set(), disk.wait(60), sync(path)))
    (state,) = states(3)
    (store,) = stores(tmp_path, asynchronous=True)
    store.save(state)
    assert waits.wait(60)
    for group in state.groups.values():
        for array in group.shards.values():
            array += 1
    disk.set()
    store.wait()
    assert_holds(tmp_path / "step_000003", 3)


def test_the_caller_of_an_asynchronous_save_does_not_wait_for_other_files(tmp_path):
    """The checkpoint does; it is not there before they are."""
    others = threading.Event()
    (store,) = stores(tmp_path, asynchronous=True, implied=lambda: others.wait(60))
    store.save(states(3)[0])
    assert not (tmp_path / "step_000003").exists()
    others.set()
    store.wait()
    assert_holds(tmp_path / "step_000003", 3)


def test_other_files_that_cannot_be_written_leave_no_checkpoint(tmp_path):
    save_step(tmp_path, 1)
    before = names(tmp_path)

    def fails():
        raise UserError("the responses cannot be written")

    (store,) = stores(tmp_path, implied=fails)
    with pytest.raises(UserError, match=r"the responses cannot be written \(step_000001 is whole"):
        store.save(states(2)[0])
    assert names(tmp_path) == before


def test_asynchronous_ranks_wait_for_one_another(tmp_path):
    given = states(2, dp=2, tp=2)
    ranks = stores(tmp_path, 4, asynchronous=True)
    for store, state in list(zip(ranks, given, strict=True))[:3]:
        store.save(state)
    time.sleep(0.2)
    assert not (tmp_path / "step_000002").exists()
    ranks[3].save(given[3])
    for store in ranks:
        store.wait()
    assert_holds(tmp_path / "step_000002", 2)
    assert names(tmp_path) == ["latest", "step_000002"]


def test_a_rank_that_never_writes_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(store_module, "PART_TIMEOUT_S", 0.1)
    with pytest.raises(UserError, match=r"rank_1: was not written in .* on a disk that all ranks share"):
        stores(tmp_path, 2)[0].save(states(1, dp=2)[0])
    assert names(tmp_path) == []


def test_the_same_step_again_takes_the_place(tmp_path):
    save_step(tmp_path, 4)
    (tmp_path / "step_000004" / "rank_0" / "model.safetensors").write_bytes(b"damaged")
    assert_holds(save_step(tmp_path, 4), 4)
    assert names(tmp_path) == ["latest", "step_000004"]


# --- which ones stay ---


def test_the_newest_and_the_best_stay(tmp_path):
    (store,) = stores(tmp_path, keep=2)
    for step in range(1, 7):
        store.save(states(step)[0], best=step in (1, 3))
        store.wait()
        assert locate(tmp_path)[0] == locate(tmp_path / "latest")[0] == tmp_path / f"step_{step:06d}"
    assert names(tmp_path) == ["best", "latest", "step_000003", "step_000005", "step_000006"]
    assert_holds(locate(tmp_path / "best")[0], 3)
    (resumed,) = stores(tmp_path, keep=1, best_step=3)
    save_and_wait(resumed, states(7)[0])
    assert names(tmp_path) == ["best", "latest", "step_000003", "step_000007"]


def test_nobody_waits_until_the_oldest_is_removed(tmp_path, monkeypatch):
    """Its pages take longer to free than a small checkpoint to write; the next save waits for it."""
    go, gone, remove = threading.Event(), [], store_module.remove_folder
    monkeypatch.setattr(store_module, "remove_folder", lambda path: (go.wait(10), remove(path), gone.append(path.name)))
    (store,) = stores(tmp_path, keep=1)
    store.save(states(1)[0])
    store.save(states(2)[0])
    assert gone == []
    assert_holds(locate(tmp_path / "latest")[0], 2)
    go.set()
    store.save(states(3)[0])
    assert gone[0] == "step_000001"
    store.wait()
    assert gone == ["step_000001", "step_000002"]
    assert names(tmp_path) == ["latest", "step_000003"]


def test_an_old_one_that_cannot_be_removed_is_reported(tmp_path, monkeypatch):
    def fails(path):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    (store,) = stores(tmp_path, keep=1)
    store.save(states(1)[0])
    monkeypatch.setattr(store_module, "remove_folder", fails)
    store.save(states(2)[0])
    with pytest.raises(UserError, match=r"step_000001: .* cannot be removed .*step_000002 is whole"):
        store.wait()
    assert_holds(tmp_path / "step_000002", 2)


def test_without_a_limit_all_stay(tmp_path):
    for step in range(8):
        save_step(tmp_path, step)
    assert len(locate(tmp_path)) == 8


# --- writing that fails ---


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("limit", [0, 100, 5_000, 20_000])
def test_a_full_disk_leaves_the_earlier_checkpoint(tmp_path, asynchronous, limit):
    save_step(tmp_path, 1)
    before = names(tmp_path)
    (store,) = stores(tmp_path, asynchronous=asynchronous)
    with (
        file_size_limit(limit),
        pytest.raises(UserError, match=r"step_000002: cannot be written \(File too large\)") as caught,
    ):
        save_and_wait(store, states(2)[0])
    assert "step_000001 is whole, and --resume_training auto continues from it" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert names(tmp_path) == before
    assert_holds(tmp_path / "step_000001", 1)
    store.check()  # it is told once
    save_and_wait(store, states(2)[0])
    assert_holds(tmp_path / "step_000002", 2)


def test_a_full_file_system(tmp_path):
    """At every size of disk between one and two checkpoints the first one stays, and nothing else."""
    disk = tmp_path / "disk"
    disk.mkdir()
    save_step(tmp_path / "probe", 1)
    need = sum(path.stat().st_size for path in (tmp_path / "probe").rglob("*")) // 1024
    for spare in (4, 40, 80):
        mount = ["mount", "-t", "tmpfs", "-o", f"size={need + 40 + spare}k", "tmpfs", disk]
        if subprocess.run(mount, capture_output=True, check=False).returncode:
            pytest.skip("mounting a file system is not permitted here")
        try:
            save_step(disk, 1)
            with pytest.raises(UserError, match=r"No space left on device.*free some space.*step_000001 is whole"):
                save_step(disk, 2)
            assert names(disk) == ["latest", "step_000001"]
            assert_holds(disk / "step_000001", 1)
        finally:
            subprocess.run(["umount", disk], check=True)


def test_no_permission(tmp_path):
    closed = tmp_path / "closed"
    closed.mkdir()
    closed.chmod(0o500)
    with (
        ordinary_user(),
        pytest.raises(UserError, match=r"Permission denied.*may write to.*no earlier checkpoint is there"),
    ):
        save_step(closed, 1)
    assert names(closed) == []


def test_a_folder_that_cannot_be_brought_to_the_disk(tmp_path, monkeypatch):
    save_step(tmp_path, 1)
    before = names(tmp_path)

    def fails(folder):
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(folder))

    with monkeypatch.context() as patched:
        patched.setattr(store_module, "sync_folder", fails)
        with pytest.raises(UserError, match=r"step_000002: cannot be written \(Input/output error\)"):
            save_step(tmp_path, 2)
    assert names(tmp_path) == before
    assert_holds(tmp_path / "step_000001", 1)


def test_another_ranks_failure(tmp_path):
    """A rank that cannot write says so itself; the others' files are in nobody's way in the next run."""
    save_step(tmp_path, 1, dp=2)
    ranks = stores(tmp_path, 2, asynchronous=True)
    first, second = states(2, dp=2)
    with file_size_limit(0), pytest.raises(UserError, match="File too large"):
        save_and_wait(ranks[1], second)
    ranks[0].save(first)
    time.sleep(0.1)
    assert_holds(choose(locate(tmp_path))[0].folder, 1)
    ranks[1].save(second)
    for store in ranks:
        store.wait()
    assert_holds(tmp_path / "step_000002", 2)


# Forks, for each step number that it reads, a child that saves the steps after it until it is killed.
SAVER = """
import os, signal, sys, time
from pathlib import Path
from training_states import states, stores
for line in sys.stdin:
    step = int(line)
    child = os.fork()
    if not child:
        (store,) = stores(Path(sys.argv[1]), keep=2)
        while True:
            step += 1
            store.save(states(step)[0], best=step % 3 == 0)
            os.write(1, f"{step}\\n".encode())
    time.sleep(float(sys.stdin.readline()))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.write(1, b"killed\\n")
"""


def test_killed_while_saving(tmp_path):
    """SIGKILL at 20 random moments of saving again and again: what `latest` names and what `auto` finds is whole."""
    rng = np.random.default_rng(0)
    tests = Path(__file__).parents[1]
    saver = subprocess.Popen(
        [sys.executable, "-c", SAVER, tmp_path],
        env=os.environ | {"PYTHONPATH": f"{tests.parent}{os.pathsep}{tests / 'helpers'}"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    done, leftovers = 0, 0
    for _ in range(20):
        print(f"{done}\n{rng.uniform(0.02, 0.25)}", file=saver.stdin, flush=True)
        saved = [int(line) for line in iter(saver.stdout.readline, "killed\n")]
        leftovers += any(name.startswith(".") for name in names(tmp_path))
        reached = max([done, *saved])
        if (tmp_path / "latest").exists():
            checkpoint, skipped = choose(locate(tmp_path))
            assert not skipped
            assert reached <= checkpoint.step <= reached + 1  # nothing that was reported as saved is lost
            assert_holds(checkpoint.folder, checkpoint.step)
            Checkpoint.open(locate(tmp_path / "latest")[0]).verify()
            done = checkpoint.step
        clean(tmp_path)
        assert not [name for name in names(tmp_path) if not name.startswith(("step_", "latest", "best"))]
    saver.stdin.close()
    saver.wait()
    assert done > 10
    assert leftovers > 3  # the kills did hit the writing


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_two_layouts_of_one_model(tmp_path_factory, data):
    """Property: whatever layout it was written in, every rank of any other layout reads its part of the same arrays."""
    model = data.draw(model_configs(layers=2))
    source, goal = (data.draw(model_layouts(model, max_dp=2)) for _ in range(2))
    arrays = full_arrays(source)
    folder = tmp_path_factory.mktemp("layouts")
    parts = shards_of(source, arrays)
    given = [TrainingState(1, {"model": ShardGroup(source, part)}) for part in parts]
    save(stores(folder, source.size), given)
    checkpoint, _ = choose(locate(folder))
    for found, expected in zip(read_all(checkpoint, goal, "model"), shards_of(goal, arrays), strict=True):
        assert found.keys() == expected.keys()
        assert all(found[name].tobytes() == array.tobytes() for name, array in expected.items())


def test_kinds_of_arrays(tmp_path):
    checkpoint = Checkpoint.open(save_step(tmp_path, 1))
    assert checkpoint.groups == KINDS
    with pytest.raises(UserError, match=r"holds model, exp_avg, exp_avg_sq, and no critic"):
        checkpoint.weights("critic")
