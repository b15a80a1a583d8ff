"""How a process starts and ends: alone in this process, and under msrun as a user would."""

import dataclasses
import gc
import json
import os
import resource
import subprocess
import sys
import threading
import time
from unittest.mock import patch

import numpy as np
import processes
import pytest
from workers import ROOT, WorkersFailed, run_msrun, run_workers

from mindrlhf.backend.comm.point_to_point import PeerGone
from mindrlhf.backend.comm.tcp import Channels
from mindrlhf.backend.process import launch as launching
from mindrlhf.backend.process.launch import (
    World,
    crowding,
    join_library,
    launch,
    operator_threads,
    started_workers,
)
from mindrlhf.errors import UserError

SCRIPT = """
import json, os, signal, sys, time
from mindrlhf.backend.comm.collectives import Collectives
from mindrlhf.backend.process.launch import launch
from mindrlhf.errors import UserError

with launch("CPU") as world:
    import mindspore
    if world.rank == 0:
        print(json.dumps({
            "rank": world.rank, "size": world.size, "graph_mode": mindspore.get_context("mode") == mindspore.GRAPH_MODE,
            "threads": os.environ["OMP_NUM_THREADS"], "cores": len(os.sched_getaffinity(0)),
        }))
    if world.size > 1:
        collectives = Collectives(world)
        collectives.barrier()
        if world.rank == 1:
            if sys.argv[1] == "user_error":
                raise UserError("shard 7 is damaged")
            if sys.argv[1] == "bug":
                raise RuntimeError("a bug")
            if sys.argv[1] == "sleep":
                time.sleep(45)
        if sys.argv[1] == "graph":
            import numpy as np
            from mindrlhf.backend.comm.graph_collectives import graph_all_reduce
            total = graph_all_reduce(collectives, (0, 1))
            if world.rank == 0:
                total(mindspore.Tensor(np.ones(3, np.float32)))
        if world.rank == 1 and sys.argv[1] in ("barrier", "graph"):
            os.kill(os.getpid(), signal.SIGKILL)
        collectives.barrier()
        print(f"rank {world.rank} came through")
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


@pytest.fixture
def environment(monkeypatch):
    """Puts back what `launch` sets."""
    for name in ("GLOG_v", "OMP_NUM_THREADS", "MS_NODE_TIMEOUT"):
        monkeypatch.setenv(name, "3")


def test_one_process_uses_all_its_cores(script):
    environment = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
    command = [sys.executable, str(script)]
    run = subprocess.run(
        command, env=environment | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=True
    )
    report = json.loads(run.stdout)
    assert (report["rank"], report["size"], report["graph_mode"]) == (0, 1, True)
    assert int(report["threads"]) == report["cores"]


def test_without_msrun_one_worker_is_started(monkeypatch):
    monkeypatch.delenv("MS_ROLE", raising=False)
    assert started_workers() == 1


def test_worker_count_unlike_the_layout():
    message = r"train.yaml: parallel_config makes the worker count 8 .* it is 1 here.*msrun --worker_num=8"
    with pytest.raises(UserError, match=message):
        launch("CPU", worker_count=8, layout_source="train.yaml: parallel_config")


def test_too_many_workers_for_the_layout(monkeypatch):
    monkeypatch.setenv("MS_ROLE", "MS_WORKER")
    monkeypatch.setenv("MS_WORKER_NUM", "4")
    with pytest.raises(UserError, match=r"worker count 2 .* it is 4 here"):
        launch("CPU", worker_count=2)


@pytest.mark.parametrize(("given", "threads"), [("3", 3), ("2,1", 2), (" 4 ", 4), ("", 7), ("0", 7), ("many", 7)])
def test_threads_of_operators(monkeypatch, given, threads):
    """As `native/team.h` reads the variable."""
    monkeypatch.setattr("mindrlhf.backend.process.launch.usable_cores", lambda: set(range(7)))
    monkeypatch.setenv("OMP_NUM_THREADS", given)
    assert operator_threads() == threads


@pytest.mark.parametrize(
    ("threads", "processes", "crowd"), [("8", 1, 1.0), ("8", 4, 4.0), ("2", 4, 1.0), ("2", 8, 2.0), ("1", 2, 1.0)]
)
def test_processes_share_the_cores_that_their_threads_have_not_alone(monkeypatch, threads, processes, crowd):
    monkeypatch.setattr("mindrlhf.backend.process.launch.usable_cores", lambda: set(range(8)))
    monkeypatch.setenv("OMP_NUM_THREADS", threads)
    assert crowding(processes) == crowd


def test_unknown_device_target(environment):
    with pytest.raises(UserError, match="'GPU', but it must be CPU or Ascend"):
        launch("GPU")


def test_ascend_without_an_npu(environment):
    from mindspore.device_context import ascend

    if ascend.is_available():
        pytest.skip("this machine has an NPU")
    with pytest.raises(UserError, match=r"no NPU with CANN .* CPU overlay"):
        launch("Ascend")


def test_the_collector_passes_over_what_was_there_before():
    """Within the world, and what is made in it is collected."""
    before = [[]]

    def collected() -> list[bool]:
        known = {id(one) for one in gc.get_objects()}
        return [id(one) in known for one in (before, inside)]

    with World(rank=0, size=1, device_target="CPU"):
        inside = [[]]
        assert collected() == [False, True]
    assert collected() == [True, True]


def test_alone_an_exception_passes_through():
    with pytest.raises(UserError, match="wrong"), World(rank=0, size=1, device_target="CPU"):
        raise UserError("wrong")


@pytest.mark.slow
@pytest.mark.msrun
@pytest.mark.parametrize(
    ("kind", "code", "message"),
    [("user_error", 2, "rank 1 of 2: shard 7 is damaged"), ("bug", 1, "RuntimeError: a bug")],
)
def test_a_failing_rank_ends_the_job(script, kind, code, message):
    run = run_msrun(2, [script, kind])
    assert run.returncode != 0
    assert f"Error code: {code}." in run.output
    assert message in run.logs[1]
    assert ("Traceback" in run.logs[1]) == (kind == "bug")
    assert "came through" not in run.output
    assert "rank 0 of 2: rank 1 is gone" in run.logs[0]


@pytest.mark.slow
@pytest.mark.msrun
@pytest.mark.parametrize("where", ["barrier", "graph"])
def test_a_killed_rank_ends_the_job_and_is_named(script, where):
    """The other one waits for it in a collective, which by itself would last for hours."""
    run = run_msrun(2, [script, where])
    assert run.returncode != 0
    assert run.logs[0].count("rank 0 of 2: rank 1 is gone: its process failed") == 1
    assert "came through" not in run.output


def gone_at_the_end(world: World, sends: bool) -> None:
    """Rank 1 is gone before the last barrier, perhaps with all sent that rank 0 needs, which has said so then."""
    peers = processes.SocketCollectives.peers
    if world.rank == 1:
        if sends:
            peers.send(np.zeros(1, np.int8), 0)
        return
    connected = dataclasses.replace(world, channels=Channels(peers, peers, peers))
    with patch.object(launching, "FOLLOWING_S", 1), connected:
        if sends:
            threading.Thread(target=connected.abort, args=(PeerGone(1),), daemon=True).start()
        while sends and not launching._ABORTING.locked():
            time.sleep(0.001)


@pytest.mark.parametrize("sends", [False, True])
def test_a_rank_that_is_gone_at_the_end_is_named_and_the_other_one_fails(capfd, sends):
    assert processes.run_processes(2, __file__, "gone_at_the_end", sends=sends) == [(1, None), (0, None)]
    said = capfd.readouterr().err
    assert said.count("rank 0 of 2: rank 1 is gone") == 1
    assert "Traceback" not in said


@pytest.mark.slow
@pytest.mark.msrun
def test_a_slow_rank_is_waited_for(script):
    run = run_msrun(2, [script, "sleep"])
    assert run.returncode == 0
    assert "rank 0 came through" in run.logs[0]
    assert run.seconds > 45


@pytest.mark.slow
@pytest.mark.msrun
def test_one_worker_under_msrun(script):
    run = run_msrun(1, [script, "none"])
    assert run.returncode == 0
    report = json.loads(run.logs[0].splitlines()[0])
    assert (report["rank"], report["size"]) == (0, 1)


@pytest.mark.slow
@pytest.mark.msrun
def test_workers_share_the_cores(script, monkeypatch):
    """Of cores that nobody gave away; the harness itself gives one thread to each worker unless told otherwise."""
    run = run_msrun(2, [script, "none"], OMP_NUM_THREADS=None)
    report = json.loads(run.logs[0].splitlines()[0])
    assert int(report["threads"]) == max(1, report["cores"] // 2)


def fail_on_rank_1(world: World) -> None:
    if world.rank == 1:
        raise ValueError("the harness must show this")


@pytest.mark.slow
@pytest.mark.msrun
def test_the_harness_shows_a_failure():
    with pytest.raises(WorkersFailed, match="the harness must show this"):
        run_workers(2, __file__, "fail_on_rank_1")


def test_workers_that_do_not_come_to_the_library(monkeypatch):
    """What MindSpore raises after its limit becomes one sentence; anything else of it passes through."""
    from mindspore import communication

    for name, value in {"MS_ROLE": "MS_WORKER", "RANK_ID": "1", "MS_WORKER_NUM": "4"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MS_SCHED_HOST", "10.0.0.1")
    monkeypatch.setenv("MS_SCHED_PORT", "8118")
    monkeypatch.setenv("MS_TOPO_TIMEOUT", "30")

    def fail(message):
        def init(backend):
            raise RuntimeError(message)

        monkeypatch.setattr(communication, "init", init)
        join_library("mccl")

    with pytest.raises(UserError, match=r"not all of the 4 workers came within 30 s \(worker 1 on .* 10\.0\.0\.1:8118"):
        fail("some processes in the cluster are not successfully spawned")
    with pytest.raises(RuntimeError, match="another trouble"):
        fail("another trouble")


def test_too_few_addresses(monkeypatch):
    """`ulimit -v`: MindSpore would fail in its own words once it compiles."""
    monkeypatch.setattr(resource, "getrlimit", lambda which: (1200 << 20, -1))
    with pytest.raises(UserError, match=r"^ulimit -v allows this process 1\.17 GiB of addresses, and MindSpore alone"):
        launch("CPU")
