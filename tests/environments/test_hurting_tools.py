"""Tools that hurt themselves, or the process that begins tools: they block no other conversation, and leave nothing."""

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from slow_cases import few_of
from waiting import wait_until

from mindrlhf.environments import pool as pools
from mindrlhf.environments.pool import EnvironmentPool

SLEEP = ["sleep", "98765"]  # as in the tools
LIMIT_S = 2.0


@pytest.fixture(autouse=True)
def _nothing_is_left():
    yield
    own = psutil.Process().children(recursive=True)
    assert [child for child in own if "environments" in str(child.cmdline())] == []
    assert sleeping() == []


def sleeping():
    """Processes that the tools have begun, whoever is their parent now."""
    return [process for process in psutil.process_iter(["cmdline"]) if process.info["cmdline"] == SLEEP]


def pool_of(hostile, environment):
    place = f"{hostile}:Counter" if environment else ""
    tools = [] if environment else [f"{hostile}:fault"]
    return EnvironmentPool({"e": place}, tools, timeout_s=LIMIT_S)


def call(pool, number, kind):
    pool.call((number,), [("fault", {"kind": kind})])


def outcomes(pool, count):
    found = []
    while len(found) < count:
        found += pool.collect(wait_for_one=True)
    return {outcome.key[0]: outcome for outcome in found}


def begin(pool, count):
    for number in range(count):
        pool.reset((number,), "e", {})
    outcomes(pool, count)


SLOW = f"it took longer than {LIMIT_S:g} s"
# What tools do, to themselves and what they begin, or to the server -> the failure of the call.
HURTING = {
    "themselves": {"join the group": SLOW, "leave": None, "leave and hang": SLOW, "leave twice": None, "deaf": SLOW}
    | {"leave and die": "its process ended", "stop": SLOW},
    "a stopped server": {"stop the parent": None, "leave and hang": SLOW, "stop the parent and hang": SLOW},
    "a dead server": {"kill the parent": None, "leave and hang": SLOW, "leave": None},
}


EITHER = [(whom, environment) for whom in HURTING for environment in (True, False)]
WAITS = ("a stopped server", True)  # as without an environment, for as long


@pytest.mark.parametrize(("whom", "environment"), few_of([one for one in EITHER if one != WAITS], [WAITS]))
def test_others_go_on(hostile, monkeypatch, whom, environment):
    """Those that have begun, and those that begin afterwards; nothing of the hurting ones is left."""
    monkeypatch.setattr(pools, "BEGIN_S", 1.0)
    kinds = HURTING[whom]
    with pool_of(hostile, environment) as pool:
        begin(pool, len(kinds) + 2)
        for number, kind in enumerate(kinds):
            call(pool, number, kind)
        found = outcomes(pool, len(kinds))
        assert [found[number].answers[0].failure for number in range(len(kinds))] == list(kinds.values())
        others = range(len(kinds), len(kinds) + 6)
        for number in others[2:]:
            pool.reset((number,), "e", {})
        outcomes(pool, 4)
        for number in others:
            call(pool, number, "fine")
        assert [outcome.answers[0].value for outcome in outcomes(pool, 6).values()] == ["fine"] * 6


def test_what_a_conversation_has_begun_ends_with_it(hostile):
    """Not with the run: a browser for each conversation would fill the memory. Others keep theirs."""
    with pool_of(hostile, True) as pool:
        begin(pool, 4)
        for number, kind in enumerate(("leave", "leave twice", "leave twice")):
            call(pool, number, kind)
        outcomes(pool, 3)
        wait_until(lambda: len(sleeping()) == 3)
        for left in (2, 1):
            pool.end((left,))
            wait_until(lambda left=left: len(sleeping()) == left)
            call(pool, 3, "fine")
            assert outcomes(pool, 1)[3].answers[0].value == "fine"
        call(pool, 0, "os exit")
        assert outcomes(pool, 1)[0].lost
        wait_until(lambda: not sleeping())


def test_many_conversations_end_at_once(hostile):
    """The server is told of all, however long it takes it."""
    with pool_of(hostile, True) as pool:
        begin(pool, 150)
        server = pool._server._process.pid
        for number in range(150):
            pool.end((number,))
        wait_until(lambda: not psutil.Process(server).children())
        wait_until(lambda: not any(any(one.iterdir()) for one in Path(pool._files.name).iterdir()))


def test_a_server_that_never_begins_costs_calls_and_no_more(hostile, monkeypatch):
    """Each call is tried a few times; nothing waits for ever."""
    monkeypatch.setattr(pools, "BEGIN_S", 0.5)
    monkeypatch.setattr(pools, "MOST_BEGINS", 2)
    with pool_of(hostile, False) as pool:
        monkeypatch.setattr(pools.ConversationPeer, "_receive", lambda self, message: [])
        pool.reset((0,), "e", {})
        pool.collect(wait_for_one=True)
        call(pool, 0, "fine")
        assert outcomes(pool, 1)[0].answers[0].failure


def test_a_server_that_is_about_to_be_dead_costs_no_call(hostile, monkeypatch):
    """Its sockets close before the kernel says that it has ended; the next process comes from another server."""
    monkeypatch.setattr(pools, "MOST_BEGINS", 1)
    with pool_of(hostile, False) as pool:
        server = pool._server
        server._process.kill()
        os.waitid(os.P_PID, server._process.pid, os.WEXITED | os.WNOWAIT)
        monkeypatch.setattr(server, "alive", lambda: True)
        begin(pool, 1)
        call(pool, 0, "fine")
        assert outcomes(pool, 1)[0].answers[0].value == "fine"


def test_a_killed_owner_leaves_no_process(owner):
    script = owner("leave twice")
    with subprocess.Popen([sys.executable, script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as owner:
        assert owner.stdout.readline() == b"leave twice\n"
        wait_until(sleeping)
        owner.kill()
    wait_until(lambda: not sleeping())
