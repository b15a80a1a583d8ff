"""The pool against tools that do everything a tool should not: calls are lost and counted, and the pool goes on."""

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from mindrlhf.environments.pool import LOST, EnvironmentPool
from mindrlhf.errors import UserError

# kind -> what the answer has, where the call goes well, and what the failure has, where it does not
GOOD = {"print": "print", "fork": "fork", "fork and raise": "fork and raise", "fork and stay": "fork and stay"}
GOOD |= {"thread": "thread", "none": "null", "surrogate": "half ?", "fine": "fine"}
FAILED = {
    "raise": "ValueError: wrong xxx",
    "exit": "SystemExit: 3",
    "memory": "MemoryError",
    "gigabyte": "MemoryError",
    "object": "returned object, and not text",
    "bytes": "has returned an image, and the model takes text alone.",
    "recurse": "RecursionError",
}
ENDED = {
    "os exit": "its process ended",
    "kill": "its process ended",
    "segfault": "its process ended",
    "scribble": "sent what is no answer",
    "close": "its process ended",
}
HUNG = ("hang", "spin", "deaf", "stop")


@pytest.fixture(autouse=True)
def _no_process_is_left():
    yield
    assert processes(recursive=True) == []


def processes(recursive=False):
    """Those of pools; other tests may have left theirs."""
    children = psutil.Process().children(recursive=recursive)
    return [child for child in children if "environments" in str(child.cmdline())]


def pool_of(hostile, *tools, environment="Counter", **limits):
    place = f"{hostile}:{environment}" if environment else ""
    return EnvironmentPool({"e": place}, [f"{hostile}:{tool}" for tool in tools], **{"timeout_s": 20.0} | limits)


def outcomes(pool, count):
    """The next ones by key, in whatever order they come."""
    found = []
    while len(found) < count:
        found += pool.collect(wait_for_one=True)
    assert len(found) == count
    return {outcome.key: outcome for outcome in found}


def ask(pool, key, *kinds):
    pool.call(key, [("fault", {"kind": kind}) for kind in kinds])
    return outcomes(pool, 1)[key].answers


def test_an_environment_from_reset_to_reward(hostile):
    with pool_of(hostile, "nap") as pool:
        assert [schema["function"]["name"] for schema in pool.schemas["e"]] == ["add", "fault", "nap"]
        assert pool.raw == {"e": False}
        for sample in range(3):
            pool.reset((1, 2, 3, sample), "e", {"start": str(10 * sample), "question": "?"})
        texts = [outcome.answers[0].value for _, outcome in sorted(outcomes(pool, 3).items())]
        assert texts == ["starts at 0 ['question']", "starts at 10 ['question']", "starts at 20 ['question']"]
        pool.call((1, 2, 3, 1), [("add", {"number": 1}), ("add", {"number": "2", "times": 3}), ("nap", {"seconds": 0})])
        assert [answer.value for answer in outcomes(pool, 1)[1, 2, 3, 1].answers] == ["11", "17", "slept 0"]
        for sample in range(3):
            pool.reward((1, 2, 3, sample))
        rewards = [outcome.answers[0].value for _, outcome in sorted(outcomes(pool, 3).items())]
        assert rewards == [0.0, 8.5, 10.0]
        pool.end((1, 2, 3, 1))
        pool.reward((1, 2, 3, 2))
        assert outcomes(pool, 1)[1, 2, 3, 2].answers[0].value == 10.0


def test_calls_that_cannot_be_made_are_answered_by_what_is_wrong(hostile):
    calls = [("add", {}), ("add", {"number": "x"}), ("add", {"number": 1, "more": 2}), ("reset", {}), ("_x", {})]
    with pool_of(hostile) as pool:
        pool.reset((0,), "e", {"start": "13"})
        outcomes(pool, 1)
        pool.call((0,), [*calls, ("add", {"number": 0})])
        answers = outcomes(pool, 1)[0,].answers
        pool.reward((0,))
        assert "not a finite number" in outcomes(pool, 1)[0,].answers[0].failure
    assert [answer.failure for answer in answers] == [
        "argument number: Missing required argument",
        "argument number: Input should be a valid integer, unable to parse string as an integer",
        "argument more: Unexpected keyword argument",
        "LookupError: there is no tool 'reset'; there is add, fault",
        "LookupError: there is no tool '_x'; there is add, fault",
        None,
    ]
    assert answers[-1].value == "13"


def test_a_raw_environment(hostile):
    with pool_of(hostile, environment="Echo") as pool:
        assert pool.raw == {"e": True}
        assert pool.schemas == {"e": []}
        pool.reset((0,), "e", {"question": "q", "task": "other"})
        assert outcomes(pool, 1)[0,].answers[0].value is None
        for text, expected in (("hello", "q: hello"), ("bye", None), ("x" * 100_000, None)):
            pool.reply((0,), text)
            answer = outcomes(pool, 1)[0,].answers[0]
            assert answer.failure is None
            if text[0] != "x":
                assert answer.value == expected
            else:
                assert len(answer.value) < 5000
        pool.reply((0,), "")
        assert "reply returned int, and not text" in outcomes(pool, 1)[0,].answers[0].failure
        pool.reward((0,))
        assert outcomes(pool, 1)[0,].answers[0].value is None


def test_random_numbers_depend_on_the_key_alone(hostile):
    def drawn(keys, workers):
        with pool_of(hostile, environment="Echo", workers=workers) as pool:
            for key in keys:
                pool.reset(key, "e", {"question": "q"})
            outcomes(pool, len(keys))
            for key in keys:
                pool.reply(key, "draw")
            return {key: outcome.answers[0].value for key, outcome in outcomes(pool, len(keys)).items()}

    keys = [(0, 1, prompt, sample) for prompt in range(2) for sample in range(3)]
    first = drawn(keys, 1)
    assert len(set(first.values())) == len(keys)
    assert drawn(keys[::-1], 4) == first


def test_tools_share_processes_and_no_random_numbers(hostile):
    """Requests without an environment share processes, but none in which one has failed."""
    calls = [("draw", {}), ("process", {})]

    def called(pool, samples):
        for sample in samples:
            pool.reset((sample,), "e", {})
        outcomes(pool, len(samples))
        for sample in samples:
            pool.call((sample,), calls)
        found = sorted(outcomes(pool, len(samples)).items())
        return [[answer.value for answer in outcome.answers] for _, outcome in found]

    with pool_of(hostile, "draw", "process", "fault", environment=None, workers=2) as pool:
        first = called(pool, range(8))
        assert len({process for _, process in first}) <= 2
        assert len({number for number, _ in first}) == 8
        pool.call((0,), calls)
        again, process = (answer.value for answer in outcomes(pool, 1)[0,].answers)
        assert again not in {number for number, _ in first}
        assert ask(pool, (0,), "raise")[0].failure
        pool.call((0,), calls)
        assert outcomes(pool, 1)[0,].answers[1].value != process
    with pool_of(hostile, "draw", "process", environment=None, workers=1) as pool:
        backwards = called(pool, range(7, -1, -1))
    assert [number for number, _ in backwards] == [number for number, _ in first]


@pytest.mark.parametrize("environment", ["Counter", None])
def test_faults_cost_their_call(hostile, environment):
    """With the process the state of an environment goes, and nothing else; what went well stays."""
    kinds = [*GOOD, *FAILED, *ENDED]
    with pool_of(hostile, *([] if environment else ["fault"]), environment=environment, memory_mb=512) as pool:
        for number in range(len(kinds)):
            pool.reset((number,), "e", {})
        outcomes(pool, len(kinds))
        for number, kind in enumerate(kinds):
            pool.call((number,), [("fault", {"kind": name}) for name in ("first", kind, "last")])
        found = outcomes(pool, len(kinds))
    for number, kind in enumerate(kinds):
        first, answer, last = found[number,].answers
        assert first.value == "first"
        if kind in GOOD:
            assert (answer.value, answer.failure) == (GOOD[kind], None), kind
        else:
            assert answer.value is None, kind
            assert (FAILED | ENDED)[kind] in answer.failure, (kind, answer.failure)
            assert len(answer.failure) < 700
        assert found[number,].lost == (kind in ENDED and environment is not None), kind
        assert last.failure == (LOST if found[number,].lost else None), kind


def test_a_forged_answer_is_a_failure(hostile):
    """A number in place of a text, sent by the tool's own code before its answer."""
    with pool_of(hostile, "fault", environment=None) as pool:
        pool.reset((0,), "e", {})
        outcomes(pool, 1)
        (answer,) = ask(pool, (0,), "forge")
    assert (answer.value, answer.failure) == (None, "its process gave no answer of the right kind")


def test_a_lost_environment_stays_lost(hostile):
    with pool_of(hostile) as pool:
        pool.reset((0,), "e", {})
        pool.reset((1,), "e", {})
        outcomes(pool, 2)
        assert ask(pool, (0,), "os exit")[0].failure == "its process ended"
        assert ask(pool, (0,), "fine")[0].failure == LOST
        pool.reward((0,))
        assert outcomes(pool, 1)[0,].answers[0].failure == LOST
        assert ask(pool, (1,), "fine")[0].value == "fine"


def test_hanging_calls_end_by_the_limit(hostile):
    with pool_of(hostile, "fault", "nap", environment=None, timeout_s=2.0, workers=4) as pool:
        for number in range(len(HUNG)):
            pool.reset((number,), "e", {})
        outcomes(pool, len(HUNG))
        for number, kind in enumerate(HUNG):
            pool.call((number,), [("fault", {"kind": kind}), ("fault", {"kind": "fine"})])
        for outcome in outcomes(pool, len(HUNG)).values():
            assert outcome.answers[0].failure == "it took longer than 2 s"
            assert outcome.answers[1].value == "fine"
            assert not outcome.lost


def test_no_more_requests_run_than_workers(hostile):
    """They all get their answers, and a conversation that ends takes its request with it."""
    with pool_of(hostile, "nap", environment=None, workers=2) as pool:
        for number in range(9):
            pool.reset((number,), "e", {})
        outcomes(pool, 9)
        for number in range(9):
            pool.call((number,), [("nap", {"seconds": 0.01})])
        pool.end((0,))
        pool.end((8,))
        assert sorted(outcomes(pool, 7)) == [(number,) for number in range(1, 8)]
        assert pool.collect(wait_for_one=True) == []


def test_long_answers_are_cut_in_the_middle(hostile):
    with pool_of(hostile, "fault", environment=None, max_output=1000) as pool:
        pool.reset((0,), "e", {})
        outcomes(pool, 1)
        text = ask(pool, (0,), "long")[0].value
    assert len(text) < 1100
    assert text[0] + text[-1] == "az"
    assert "[... 9999002 characters ...]" in text


def test_nothing_is_left_behind(hostile):
    """Neither children of a tool, nor its temporary files."""
    with pool_of(hostile, "process") as pool:
        pool.reset((0,), "e", {})
        outcomes(pool, 1)
        file = Path(ask(pool, (0,), "write")[0].value)
        assert file.is_file()
        ask(pool, (0,), "fork and stay")
        pool.call((0,), [("process", {})])
        worker = psutil.Process(int(outcomes(pool, 1)[0,].answers[0].value))
        (child,) = worker.children()
        pool.end((0,))
        assert psutil.wait_procs([worker, child], timeout=5)[1] == []
    assert not file.parent.exists()


def test_a_killed_owner_leaves_no_files(owner):
    """The process that begins those of tools removes their folder, and ends them."""
    script = owner("write")
    command = [sys.executable, script]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as owner:
        file = Path(owner.stdout.readline().strip())
        assert file.is_file()
        workers = psutil.Process(owner.pid).children(recursive=True)
        assert len(workers) == 2
        owner.kill()
    assert psutil.wait_procs(workers, timeout=20)[1] == []
    assert not file.parent.exists()


def test_files_go_when_the_owner_s_end_is_seen_before_its_death(hostile):
    """The kernel closes a killed owner's socket before its children have another parent."""
    with pool_of(hostile) as pool:
        pool.reset((0,), "e", {})
        outcomes(pool, 1)
        file = Path(ask(pool, (0,), "write")[0].value)
        servers = processes()
        pool._control.close()
        assert psutil.wait_procs(servers, timeout=20)[1] == []
        assert not file.parent.exists()


def test_a_dead_server_is_replaced(hostile):
    with pool_of(hostile) as pool:
        for number in range(2):
            pool.reset((number,), "e", {"start": str(number)})
        outcomes(pool, 2)
        servers = processes()
        assert servers
        ask(pool, (0,), "kill the parent")
        assert psutil.wait_procs(servers, timeout=5)[1] == []
        pool.reset((2,), "e", {"start": "2"})
        assert outcomes(pool, 1)[2,].answers[0].value == "starts at 2 []"
        pool.call((1,), [("add", {"number": 1})])  # conversations outlive it
        assert outcomes(pool, 1)[1,].answers[0].value == "2"


def test_answers_to_nobody(hostile):
    with pool_of(hostile) as pool:
        assert pool.collect(wait_for_one=True) == []
        pool.reset((0,), "e", {})
        assert outcomes(pool, 1)[0,].action == "reset"
        pool.call((0,), [])
        assert outcomes(pool, 1)[0,].answers == ()


REFUSED = {
    "def f(a): 'x'": "argument 'a' has no type; write a: str",
    "def f(a: int): pass": "tool 'f' has no docstring",
    "def f(*a: int): 'x'": r"argument '\*a: int' should be one with a name",
    "def f(a: 'Nope'): 'x'": "types that JSON has",
    "class X: pass\ndef f(a: X): 'x'": "types that JSON has",
    "f = 5": "is not a function",
    "import nothing_like_it": "there is no module|fails with ModuleNotFoundError",
}


@pytest.mark.parametrize("source", REFUSED)
def test_tools_that_say_too_little_are_refused(tmp_path, source):
    (tmp_path / "mine.py").write_text(source)
    with pytest.raises(UserError, match=REFUSED[source]):
        EnvironmentPool({"e": ""}, [f"{tmp_path / 'mine.py'}:f"])


ENVIRONMENTS = {
    "class E:\n    pass": "'E' answers nothing",
    "class E:\n    def reply(self, text): ...\n\n    def other(self): ...\n": "answers by `reply`, and there are tools",
    "class E:\n    def f(self):\n        'x'": "have a tool of the same name",
    "def E(): ...": "is no class",
}


@pytest.mark.parametrize("source", ENVIRONMENTS)
def test_environments_that_cannot_answer_are_refused(tmp_path, source):
    (tmp_path / "mine.py").write_text(f"{source}\n\ndef f() -> str:\n    'Do it.'\n")
    tools = [f"{tmp_path / 'mine.py'}:f"] if "def" in source else []
    with pytest.raises(UserError, match=ENVIRONMENTS[source]):
        EnvironmentPool({"e": f"{tmp_path / 'mine.py'}:E"}, tools)


def test_unknown_names_are_refused():
    with pytest.raises(UserError, match="tools none, calculator: none stands alone"):
        EnvironmentPool({"e": ""}, ["none", "calculator"])
    with pytest.raises(UserError, match="tool 'calculater' is not known"):
        EnvironmentPool({"e": ""}, ["calculater"])
    with pytest.raises(UserError, match="environment 'wordel' is not known"):
        EnvironmentPool({"e": "wordel"})
