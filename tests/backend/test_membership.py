"""How ranks meet, and how all of them learn that one fails: a scheduler and ranks as threads of this process."""

import json
import socket
import threading
import time

import numpy as np
import pytest
from ranks import run_threads
from workers import run_msrun

from mindrlhf.backend.comm import membership, scheduler
from mindrlhf.backend.comm.membership import join
from mindrlhf.backend.comm.point_to_point import PeerGone, PeerSilent
from mindrlhf.backend.comm.scheduler import FORMAT, Scheduler, run_scheduler
from mindrlhf.errors import UserError

PATIENCE_S = 30


@pytest.fixture
def job(monkeypatch):
    """Starts schedulers at an address that the environment names, with quick ticks; returns `start(size, ...)`."""
    monkeypatch.setattr(scheduler, "TICK_S", 0.02)
    monkeypatch.setattr(membership, "TICK_S", 0.02)
    monkeypatch.setattr(scheduler, "FAREWELL_S", 0.2)
    monkeypatch.delenv("RANK_ID", raising=False)
    server = socket.create_server(("127.0.0.1", 0))
    monkeypatch.setenv("MS_SCHED_HOST", "127.0.0.1")
    monkeypatch.setenv("MS_SCHED_PORT", str(server.getsockname()[1]))

    def start(size: int, start_limit_s: float = PATIENCE_S, silence_limit_s: float = PATIENCE_S):
        ended = []
        serve = Scheduler(size, start_limit_s, silence_limit_s).serve
        thread = threading.Thread(target=lambda: ended.append(serve(server)), daemon=True)
        thread.start()

        def result() -> bool:
            thread.join(PATIENCE_S)
            return ended[0]

        return result

    yield start
    server.close()


def meet(size, rank, host="here", start_limit_s=PATIENCE_S, silence_limit_s=PATIENCE_S):
    return join(size, rank, host, start_limit_s=start_limit_s, silence_limit_s=silence_limit_s)


def stranger(content: bytes = b"") -> socket.socket:
    connection = socket.create_connection(scheduler.scheduler_address())
    connection.sendall(content)
    return connection


def test_ranks_meet_and_leave(job):
    result = job(3)

    def work(rank):
        number, members, channels, member = meet(3, rank, f"host {rank // 2}")
        assert number == rank
        assert [one.host for one in members] == ["host 0", "host 0", "host 1"]
        channels.gathers.send(np.array(rank), (rank + 1) % 3)
        assert channels.gathers.receive(np.array(0), (rank - 1) % 3) == (rank - 1) % 3
        member.watch(lambda error: pytest.fail(str(error)))
        member.leave()

    run_threads(3, work)
    assert result() is True


def test_ranks_without_numbers_get_one_each(job):
    """As on several hosts without --node_rank; one of them knows its own."""
    result = job(3)
    numbers = []

    def work(rank):
        number, members, _, member = meet(3, 1 if rank == 2 else None)
        numbers.append(number)
        assert len({one.port for one in members}) == 3
        if rank == 2:
            assert number == 1
        member.leave()

    run_threads(3, work)
    assert sorted(numbers) == [0, 1, 2]
    assert result() is True


def test_a_rank_that_goes_is_named_to_all_others(job):
    result, errors = job(3), {}
    all_told = threading.Event()

    def work(rank):
        _, _, _, member = meet(3, rank)
        if rank == 1:
            member._lines.connection.close()  # as the end of a process does
            return
        member.watch(lambda error: (errors.update({rank: error}), len(errors) == 2 and all_told.set()))
        assert all_told.wait(PATIENCE_S)

    run_threads(3, work)
    assert {rank: type(error) for rank, error in errors.items()} == {0: PeerGone, 2: PeerGone}
    assert all(str(error).startswith("rank 1 is gone: ") for error in errors.values())
    assert result() is False


def test_a_rank_that_stands_still_is_named_with_its_phase(job, monkeypatch, capsys):
    monkeypatch.setattr(scheduler, "SILENCE_S", 0.1)
    result, errors, told = job(2, silence_limit_s=0.5), [], threading.Event()

    def work(rank):
        _, _, _, member = meet(2, rank)
        member.phase = ("update_actor", "gen")[rank]
        if rank == 1:
            member._lines.send({"phase": "gen"})
            assert told.wait(PATIENCE_S)  # its connection stays open, and it says nothing
        else:
            member.watch(lambda error: (errors.append(error), told.set()))
            assert told.wait(PATIENCE_S)

    run_threads(2, work)
    assert type(errors[0]) is PeerSilent
    assert "rank 1 stood still for" in str(errors[0])
    assert "in the phase gen (this rank: update_actor)" in str(errors[0])
    assert "trainer.rank_timeout_s" in str(errors[0])
    assert "rank 1 has said nothing for" in capsys.readouterr().out
    assert result() is False


def test_a_slow_rank_that_speaks_is_waited_for(job):
    """It computes for longer than the limit, and its thread goes on."""
    result = job(2, silence_limit_s=0.3)

    def work(rank):
        _, _, channels, member = meet(2, rank)
        member.watch(lambda error: pytest.fail(str(error)))
        if rank == 1:
            time.sleep(1)
            channels.messages.send(np.array(7), 0)
        else:
            assert channels.messages.receive(np.array(0), 1) == 7
        member.leave()

    run_threads(2, work)
    assert result() is True


def test_a_scheduler_that_goes_is_noticed(job, monkeypatch):
    job(2)
    errors, told = [], threading.Event()

    def work(rank):
        _, _, _, member = meet(2, rank)
        if rank == 0:
            member.watch(lambda error: (errors.append(error), told.set()))
            member._lines.connection.shutdown(socket.SHUT_RD)  # as its end does
        assert told.wait(PATIENCE_S)
        member._lines.connection.close()

    run_threads(2, work)
    assert "msrun's scheduler is gone" in str(errors[0])


def hello(**changes) -> bytes:
    member = {"address": "127.0.0.1", "port": 1, "secret": "x", "host": None}
    first = {"format": FORMAT, "size": 2, "rank": None, "member": member} | changes
    return json.dumps(first).encode() + b"\n"


STRANGERS = [
    b"",
    bytes(4096),
    b"\xff" * 4096,
    b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    b"RPC0" * 100,
    b"\n" * 1000,
    b"[]\n",
    b"{}\n",
    b"null\n",
    b'"text"\n',
    b"[" * 5000 + b"\n",
    b'{"phase": "gen"}\n',
    b'{"left": true}\n',
    b"x" * (1 << 20),
    hello(format="other"),
    hello(size="two"),
    hello(size=3),
    hello(rank=9),
    hello(rank="x"),
    hello(member=None),
    hello(member=[1]),
    hello(member=["127.0.0.1", "port", "x", None]),
]


def test_strangers_hold_nothing_up(job):
    """Before the ranks come, and while they work; some hang up, some stay."""
    result = job(2)

    def shout():
        connections = []
        for content in STRANGERS:
            try:
                connections.append(stranger(content))
            except OSError:  # it was thrown out while it still sent
                continue
        for connection in connections[::2]:
            connection.close()
        return connections

    before = shout()

    def work(rank):
        _, _, channels, member = meet(2, rank)
        member.watch(lambda error: pytest.fail(str(error)))
        kept = [] if rank else shout()
        for number in range(20):
            channels.gathers.send(np.array(number), 1 - rank)
            assert channels.gathers.receive(np.array(0), 1 - rank) == number
        member.leave()
        return kept

    kept = run_threads(2, work)
    assert result() is True
    for connection in [*before, *kept[0]]:
        connection.close()


@pytest.mark.parametrize(
    ("size", "rank", "sentence"),
    [
        (3, 0, r"belongs to another job, of 2 workers: give each job a --master_port of its own"),
        (2, 5, r"rank 5 is not below the worker count 2"),
        (2, 1, r"rank 1 is there already: give each host its own --node_rank"),
    ],
)
def test_a_worker_of_another_job_is_refused(job, size, rank, sentence):
    job(2)
    first = stranger(hello(rank=1))
    time.sleep(0.1)
    with pytest.raises(UserError, match=sentence):
        meet(size, rank)
    first.close()


def test_workers_that_do_not_come_are_named(job):
    result = job(3, start_limit_s=0.3)
    with pytest.raises(
        UserError, match=r"rank 0, 2 of 3 did not come within 0\.3 s; .* MS_TOPO_TIMEOUT sets the limit"
    ):
        meet(3, 1)
    assert result() is False


def test_a_scheduler_that_does_not_come(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    monkeypatch.setenv("MS_SCHED_HOST", "127.0.0.1")
    monkeypatch.setenv("MS_SCHED_PORT", str(port))
    monkeypatch.setenv("RANK_ID", "1")
    with pytest.raises(
        UserError, match=rf"the 4 workers did not meet within 0\.2 s \(worker 1 on .* 127\.0\.0\.1:{port}"
    ):
        meet(4, 1, start_limit_s=0.2)


def test_another_program_at_the_address(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("MS_SCHED_HOST", "127.0.0.1")
        monkeypatch.setenv("MS_SCHED_PORT", str(server.getsockname()[1]))

        def answer():
            connection, _ = server.accept()
            connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        threading.Thread(target=answer, daemon=True).start()
        with pytest.raises(UserError, match="the scheduler gives no answer"):
            meet(2, 0)


def test_a_port_that_is_in_use(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        monkeypatch.setenv("MS_SCHED_HOST", "127.0.0.1")
        monkeypatch.setenv("MS_SCHED_PORT", str(port))
        with pytest.raises(UserError, match=rf"cannot listen on 127\.0\.0\.1:{port} .*--master_port"):
            run_scheduler(2, 1.0, 1.0)


WORK = """
import os, signal, subprocess, sys, time
from mindrlhf.backend.comm.collectives import Collectives
from mindrlhf.backend.process.launch import launch

with launch("CPU", rank_timeout_s=float(sys.argv[1])) as world:
    collectives = Collectives(world)
    collectives.barrier()
    if world.rank == 1:
        world.enter_phase("gen")
        time.sleep(2)
        wake = f"sleep {sys.argv[2]}; kill -CONT {os.getpid()}"
        subprocess.Popen(["sh", "-c", wake], start_new_session=True)
        os.kill(os.getpid(), signal.SIGSTOP)
    world.enter_phase("reward")
    collectives.barrier()
    print(f"rank {world.rank} came through")
"""


@pytest.mark.slow
@pytest.mark.msrun
def test_a_rank_that_is_stopped_for_a_minute_is_waited_for(tmp_path):
    (tmp_path / "work.py").write_text(WORK)
    run = run_msrun(2, [tmp_path / "work.py", "600", "60"])
    assert run.returncode == 0
    assert "rank 1 has said nothing for 30 s, in the phase gen: waiting" in run.logs[0]
    assert all(f"rank {rank} came through" in run.logs[rank] for rank in range(2))


@pytest.mark.slow
@pytest.mark.msrun
def test_a_rank_that_is_stopped_for_longer_is_named_on_all_ranks(tmp_path):
    (tmp_path / "work.py").write_text(WORK)
    run = run_msrun(2, [tmp_path / "work.py", "5", "8"])
    assert run.returncode != 0
    for rank in range(2):
        assert f"rank {rank} of 2: rank 1 stood still for" in run.logs[rank]
        assert "in the phase gen" in run.logs[rank]
        assert "Traceback" not in run.logs[rank]


PORTS = """
import os, socket, sys
import numpy as np
import psutil
from mindrlhf.backend.comm.collectives import Collectives
from mindrlhf.backend.comm.graph_collectives import SocketSum
from mindrlhf.backend.process.launch import launch

PAYLOADS = (b"", b"x", bytes(4096), bytes(65536), b"\\xff" * 4096, b"RPC0" * 1024, b"GET / HTTP/1.1\\r\\n\\r\\n")

with launch("CPU") as world:
    from mindspore import Tensor
    collectives, group = Collectives(world), (0, 1)
    total = SocketSum(world, group)
    family = psutil.Process(os.getppid()).children(recursive=True)
    listening = {one.laddr for member in family for one in member.net_connections() if one.status == "LISTEN"}
    kept = []
    for step in range(5):
        for address in listening:
            for payload in PAYLOADS if world.rank == 0 else ():
                kept.append(socket.create_connection(address, timeout=5))
                kept[-1].sendall(payload)
        assert collectives.all_gather_object(step) == [step, step]
        assert (total(Tensor(np.ones(1 << 15, np.float32))).asnumpy() == 2).all()
    others = {address.port for address in listening} ^ {int(os.environ["MS_SCHED_PORT"])}
    print(f"rank {world.rank} came through beside {len(kept)} strangers on {others}")
"""


@pytest.mark.slow
@pytest.mark.msrun
def test_no_port_of_a_job_holds_it_up(tmp_path):
    """Every port that any process of the job listens on gets strangers' bytes; only the scheduler's is open."""
    (tmp_path / "ports.py").write_text(PORTS)
    run = run_msrun(2, [tmp_path / "ports.py"])
    assert run.returncode == 0, run.output
    assert "rank 0 came through beside 35 strangers on set()" in run.logs[0]
