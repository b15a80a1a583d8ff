"""The runner against functions that do everything a reward function should not."""

import os
import signal

import numpy as np
import psutil
import pytest
from reward_pools import FAULTS, command, runner, texts
from slow_cases import few_of

from mindrlhf.configs.grpo import RewardFunctionSettings, RewardSettings
from mindrlhf.errors import UserError
from mindrlhf.rewards.batches import Sample
from mindrlhf.rewards.process import Reply
from mindrlhf.rewards.runner import HOPELESS_AFTER, RewardRunner
from mindrlhf.rewards.table import build_table
from mindrlhf.types import Prompt

LOST = {
    "raise": "ValueError: what xxx",
    "bad text": "Nasty: (its text fails with RuntimeError)",
    "interrupt": "KeyboardInterrupt",
    "recurse": "RecursionError",
    "nan": "it is nan, and not a finite number",
    "inf": "it is -inf, and not a finite number",
    "huge": "not a finite number",
    "text": "it is str '1.0', and not a number",
    "list": "it is list [1.0], and not a number",
    "no score": "without 'score' (keys: acc)",
    "exit": "SystemExit: 3",
    "mutate": "TypeError: 'mappingproxy' object does not support item assignment",
    "os exit": "its process ended with exit code 3",
    "kill": "its process died of signal 9",
    "segfault": "its process died of signal 11",
    "close": "its process ended with exit code 1",
    "scribble": "sent what is no answer",
    "close and hang": "stopped answering",
    "memory": "MemoryError",
    "deep": "sent what is no answer",
    "other kinds": "sent what is no answer",
    "beyond": "sent what is no answer",
    "not finite": "sent what is no answer",
    "long list": "it is list [1.0, 1.0, 1.0, 1.0, 1.0, 1.0, ...], and not a number",
    "bare name": r"the component's name 'half \ud800' should be",
    "escape name": r"the component's name '\x1b[31mred' should be",
    "long name": "xxx' should be at most 200 characters",
    "bad message": r"ValueError: half \ud800, red \u001b[31m, two\u000alines (faults.py",
    "patch": "its process ended with exit code 1",
}
HUNG = ("hang", "spin", "deaf", "stop")


@pytest.mark.parametrize("workers", few_of([3], [1]))
def test_a_fault_costs_its_sample_only(faults, workers):
    completions = []
    for number, fault in enumerate((*LOST, *HUNG, "print", "read", "none", "parts", "only parts", "numpy", "thread")):
        completions += [fault, str(number)]
    with runner(f"{faults}:fault", workers=workers, timeout_s=1.5) as pool:
        table = pool.score(texts(*completions))
        again = pool.score(texts("3", "raise", "4"))
    scores = dict(zip(completions, table.by_function["fault"], strict=True))
    for number in range(len(completions) // 2):
        assert scores[str(number)] == number
    for fault, reason in LOST.items():
        assert np.isnan(scores[fault]), fault
        error = table.errors["fault"][completions.index(fault)]
        assert reason in error, error
        assert len(error) < 700
    for fault in HUNG:
        assert np.isnan(scores[fault])
        assert table.errors["fault"][completions.index(fault)] == "it took longer than 1.5 s"
    assert table.failures == {"fault": len(LOST)}
    assert table.timeouts == {"fault": len(HUNG)}
    assert scores["print"] == 1.5
    assert (scores["read"], scores["numpy"], scores["thread"]) == (0.0, 2.0, 1.25)
    assert np.isnan(scores["none"])
    assert completions.index("none") not in table.errors["fault"]
    np.testing.assert_array_equal(again.totals, np.float32([3, np.nan, 4]))


def test_a_ground_truth_that_is_missing_is_told_beforehand(faults):
    """Only where a function compares with one; the row is named."""
    prompts = [Prompt(3, np.ones(2, np.int32), {"ground_truth": "5"}), Prompt(7, np.ones(2, np.int32), {"task": "t"})]
    with runner(f"{faults}:constant", "format") as pool:
        assert pool.comparing == ()
        pool.check_ground_truths(prompts, "open.mindrecord")
        assert pool.score([Sample("q", "a", prompts[1].fields)]).totals[0] == 1.0
    with runner(f"{faults}:constant", "gsm8k") as pool:
        pool.check_ground_truths(prompts[:1], "open.mindrecord")
        with pytest.raises(UserError, match=r"open\.mindrecord: row 7 has no ground truth, .* 'gsm8k' compares"):
            pool.check_ground_truths(prompts, "open.mindrecord")


def test_components(faults):
    with runner(f"{faults}:fault") as pool:
        table = pool.score(texts("parts", "2", "only parts"))
    np.testing.assert_array_equal(table.by_function["fault"], np.float32([1, 2, np.nan]))
    assert set(table.components["fault"]) == {"length", "ratio"}
    np.testing.assert_array_equal(table.components["fault"]["length"], np.float32([4, np.nan, 8]))
    np.testing.assert_array_equal(table.components["fault"]["ratio"], np.float32([0.25, np.nan, np.nan]))


def test_totals_are_weighted_sums_of_what_was_scored(faults):
    names = (f"{faults}:constant", f"{faults}:fault", f"{faults}:fault")
    with runner(*names, weights=[10.0, 2.0, 0.0], args={"value": 0.5}) as pool:
        assert pool.names == ("constant", "fault", "fault_2")
        table = pool.score(texts("1", "none", "raise"))
    np.testing.assert_array_equal(table.totals, [5 + 2, 5, np.nan])  # no opinion, and a failure
    assert table.totals.dtype == np.float64
    assert {array.dtype for array in table.by_function.values()} == {np.dtype(np.float64)}
    with runner(f"{faults}:fault", f"{faults}:constant", weights=[1.0, 0.0]) as pool:
        table = pool.score(texts("1", "none", "raise"))
    np.testing.assert_array_equal(table.totals, np.float32([1, np.nan, np.nan]))  # weight 0 only watches
    np.testing.assert_array_equal(table.by_function["constant"], np.float32([1, 1, 1]))


@pytest.mark.parametrize("fault", ["raise", "hang", "os exit", "nan"])
def test_a_failure_leaves_its_sample_unscored(faults, fault):
    """Whatever the other functions say; a function that only watches costs nothing."""
    names = (f"{faults}:constant", f"{faults}:fault")
    with runner(*names, timeout_s=0.3) as pool:
        table = pool.score(texts("1", fault, "none"))
    np.testing.assert_array_equal(table.totals, [2, np.nan, 1])
    np.testing.assert_array_equal(table.by_function["constant"], [1, 1, 1])
    with runner(*names, weights=[1.0, 0.0], timeout_s=0.3) as pool:
        np.testing.assert_array_equal(pool.score(texts("1", fault, "none")).totals, [1, 1, 1])


@pytest.mark.parametrize("weights", [[0.1, 0.2, 0.3], [0.3, 0.1, 0.2], [0.7, 0.1, 0.2]])
def test_equal_sums_are_equal_rewards(faults, weights):
    """Whichever functions gave them, and in whatever order."""
    source = faults.with_name("digits.py")
    source.write_text("".join(f"def f{n}(completion, ground_truth): return float(completion[{n}])\n" for n in range(3)))
    tens = [round(10 * weight) for weight in weights]
    every = [(a, b, c) for a in range(10) for b in range(10) for c in range(10)]
    total = max(range(60), key=lambda sum_: sum(a * tens[0] + b * tens[1] + c * tens[2] == sum_ for a, b, c in every))
    equal = [one for one in every if sum(x * y for x, y in zip(one, tens, strict=True)) == total]
    assert len(equal) > 10
    with runner(*(f"{source}:f{n}" for n in range(3)), weights=weights) as pool:
        totals = pool.score(texts(*("".join(map(str, one)) for one in equal))).totals
    assert set(totals) == {total / 10}
    huge = build_table([1.0, 1.0, 1.0], {str(n): [Reply(x)] for n, x in enumerate((1e16, 0.1, -1e16))}, 3)
    assert huge.totals.tolist() == [0.1]


def test_the_overlong_punishment_fails_like_any_function():
    replies = {"f": [Reply(1.0), Reply(1.0)], "soft_overlong": [Reply(-0.5), Reply(error="no")]}
    np.testing.assert_array_equal(build_table([1.0, 1.0], replies, scoring=1).totals, [0.5, np.nan])


def test_the_overlong_punishment_makes_no_total_of_its_own(faults):
    named = RewardFunctionSettings(name=f"{faults}:fault")
    settings = RewardSettings(functions=(named,), overlong_factor=0.5, overlong_buffer=4)
    fields = {"ground_truth": "5", "response_length": "8", "max_new_tokens": "10"}
    with RewardRunner(settings) as pool:
        table = pool.score([Sample("a prompt", completion, fields) for completion in ("1", "none")])
    assert pool.names == ("fault", "soft_overlong")
    np.testing.assert_array_equal(table.by_function["soft_overlong"], np.float32([-0.5, -0.5]))
    np.testing.assert_array_equal(table.totals, np.float32([1 - 0.5 * 0.5, np.nan]))


def test_one_function_fails_and_the_other_scores(faults):
    with runner(f"{faults}:fault", f"{faults}:constant", timeout_s=0.3) as pool:
        table = pool.score(texts("1", "hang", "os exit", "raise"))
    np.testing.assert_array_equal(table.by_function["fault"], np.float32([1, np.nan, np.nan, np.nan]))
    np.testing.assert_array_equal(table.by_function["constant"], np.float32([1, 1, 1, 1]))
    assert table.failures == {"fault": 2, "constant": 0}
    assert table.timeouts == {"fault": 1, "constant": 0}


def test_the_first_failing_input_is_shown_once(faults):
    with runner(f"{faults}:fault", f"{faults}:constant") as pool:
        first = pool.score(texts("1", "nan", "raise")).first_failures
        second = pool.score(texts("inf")).first_failures
    assert [(failure.function, failure.sample, failure.completion) for failure in first] == [("fault", 1, "nan")]
    assert (first[0].prompt, dict(first[0].fields)) == ("a prompt", {"ground_truth": "5"})
    assert "nan" in first[0].reason
    assert second == ()


def test_a_function_that_always_hangs_is_given_up_for_the_batch(faults):
    with runner(f"{faults}:fault", f"{faults}:constant", timeout_s=0.2) as pool:
        table = pool.score(texts(*["hang"] * 64))
        assert table.timeouts["fault"] == HOPELESS_AFTER
        assert table.failures["fault"] == 64 - HOPELESS_AFTER
        assert np.isnan(table.by_function["fault"]).all()
        np.testing.assert_array_equal(table.totals, np.full(64, np.nan))
        # The next batch begins anew; and once something was scored, every hang costs its own sample only.
        assert pool.score(texts("5")).totals[0] == 6
        table = pool.score(texts("1", *["hang"] * (HOPELESS_AFTER + 1), "2"))
    assert table.timeouts["fault"] == HOPELESS_AFTER + 1
    assert table.by_function["fault"][-1] == 2


def test_order_does_not_depend_on_speed(faults):
    draw = np.random.default_rng(0)
    samples = [Sample("", str(number), {"seconds": str(draw.uniform(0, 0.004))}) for number in range(100)]
    with runner(f"{faults}:doze", workers=3) as pool:
        table = pool.score(samples)
    np.testing.assert_array_equal(table.totals, np.arange(100, dtype=np.float32))
    assert (table.seconds["doze"] >= [float(sample.fields["seconds"]) * 0.99 for sample in samples]).all()


def test_no_samples(faults):
    with runner(f"{faults}:fault") as pool:
        table = pool.score([])
    assert table.totals.shape == (0,)
    assert table.by_function["fault"].shape == (0,)


def test_any_text_travels(faults):
    nasty = ["\ud800 half a surrogate", "line\nbreak\r\u2028", "\0", "🙂" * 10, "x" * 3_000_000]
    (faults.parent / "echo.py").write_text(
        "def same(prompt, completion, fields): return prompt == completion == fields['t']"
    )
    with runner(f"{faults.parent / 'echo.py'}:same") as pool:
        table = pool.score([Sample(text, text, {"t": text}) for text in nasty])
    np.testing.assert_array_equal(table.totals, np.ones(len(nasty), np.float32))


def test_workers_stay_light(faults):
    modules = ("mindspore", "numpy", "pydantic", "math_verify")
    with runner(f"{faults}:loaded", "gsm8k") as pool:
        table = pool.score([Sample("", "", {"module": name, "ground_truth": "1"}) for name in modules])
    np.testing.assert_array_equal(table.by_function["loaded"], np.zeros(len(modules), np.float32))


def test_a_worker_that_died_between_batches_is_replaced(faults):
    with runner(f"{faults}:process") as pool:
        first = int(pool.score(texts("")).totals[0])
        os.kill(first, signal.SIGKILL)
        psutil.wait_procs([psutil.Process(first)], timeout=0.2)
        table = pool.score(texts("", ""))
    assert table.failures == {"process": 0}
    assert table.totals[0] == table.totals[1] != first


def test_a_function_that_can_no_longer_be_loaded(faults):
    with runner(f"{faults}:fault", timeout_s=5.0) as pool:
        faults.write_text("1 / 0\n")
        table = pool.score(texts("1", "os exit", "2", "3"))
        np.testing.assert_array_equal(table.totals, np.float32([1, np.nan, np.nan, np.nan]))
        assert "could not be replaced: " in table.errors["fault"][3]
        assert "ZeroDivisionError" in table.errors["fault"][3]
        faults.write_text(FAULTS)
        np.testing.assert_array_equal(pool.score(texts("4")).totals, np.float32([4]))


def test_an_interrupt_leaves_a_runner_that_works(faults):
    def interrupt(number, frame):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with runner(f"{faults}:fault", workers=2) as pool:
            signal.setitimer(signal.ITIMER_REAL, 0.3)
            with pytest.raises(KeyboardInterrupt):
                pool.score(texts("1", "hang", "2", "hang"))
            np.testing.assert_array_equal(pool.score(texts("3", "4")).totals, np.float32([3, 4]))
    finally:
        signal.signal(signal.SIGALRM, before)


def test_closing_ends_everything(faults):
    pool = runner(f"{faults}:process", workers=3)
    children = {int(pid) for pid in pool.score(texts(*[""] * 50)).totals}
    pool.close()
    pool.close()
    assert not any(psutil.pid_exists(pid) for pid in children)
    with pytest.raises(RuntimeError, match="closed"):
        pool.score(texts("1"))


def test_scores_in_the_background_are_those_of_a_call(faults):
    """A fault in one batch is its own."""
    with runner(f"{faults}:fault", workers=2) as pool:
        before = pool.score(texts("1", "raise", "2"))
        begun = [pool.begin(texts("1", "raise", "2")), pool.begin(texts("5", "kill", "6"))]
        last = pool.score(texts("7"))
        np.testing.assert_array_equal(begun[0].result().totals, before.totals)
        np.testing.assert_array_equal(begun[1].result().totals, np.float32([5, np.nan, 6]))
        np.testing.assert_array_equal(last.totals, np.float32([7]))
    with pytest.raises(RuntimeError, match="closed"):
        pool.begin(texts("1"))


def test_a_later_batch_begins_while_an_earlier_one_waits(tmp_path):
    """The first batch's call ends only after the second's, which another process has."""
    (tmp_path / "meet.py").write_text(
        "import pathlib, time\n"
        "def batch(completions, **_):\n"
        "    seen = pathlib.Path(__file__).with_name('seen')\n"
        "    if completions[0] == 'second':\n"
        "        seen.touch()\n"
        "    while not seen.exists():\n"
        "        time.sleep(0.01)\n"
        "    return [1.0] * len(completions)\n"
    )
    with runner(f"{tmp_path / 'meet.py'}:batch", workers=2, timeout_s=60.0) as pool:
        begun = [pool.begin(texts("first", "first")), pool.begin(texts("second"))]
        np.testing.assert_array_equal(begun[0].result().totals, np.float32([1, 1]))
        np.testing.assert_array_equal(begun[1].result().totals, np.float32([1]))


def test_what_fails_in_the_background_is_raised_where_it_is_waited_for(faults, monkeypatch):
    def failing(*_, **__):
        raise ZeroDivisionError("no table")

    with runner(f"{faults}:fault") as pool:
        with monkeypatch.context() as patch:
            patch.setattr("mindrlhf.rewards.runner.build_table", failing)
            with pytest.raises(ZeroDivisionError, match="no table"):
                pool.begin(texts("1")).result(60)
        np.testing.assert_array_equal(pool.score(texts("2")).totals, np.float32([2]))


def test_closing_ends_what_goes_on_in_the_background(faults):
    """Without it, closing would take the functions' ten minutes."""
    others = {process.pid for process in psutil.Process().children()}
    pool = runner(f"{faults}:fault", workers=2, timeout_s=600.0)
    begun = [pool.begin(texts("hang", "hang", "hang")), pool.begin(texts("1"))]
    pool.close()
    assert all(one.cancelled() or one.exception() is not None for one in begun)
    assert {process.pid for process in psutil.Process().children()} <= others


def test_what_a_hanging_function_has_started_ends_with_it(faults):
    seconds = f"1000.{os.getpid()}"  # a command line that no other process has
    with runner(f"{faults}:fault", timeout_s=0.4) as pool:
        table = pool.score([Sample("", "1", {}), Sample("", "deaf", {"sleep": seconds})])
        assert table.timeouts == {"fault": 1}
        assert [process for process in psutil.process_iter() if command(process) == ["sleep", seconds]] == []


@pytest.mark.parametrize(
    ("name", "args", "expected"),
    [
        ("gsmk8", {}, "nearest: 'gsm8k'"),
        ("none.py:f", {}, "there is no file"),
        ("{faults}:nothing", {}, "has no 'nothing'"),
        ("{faults}:constant", {"valeu": 1}, "has no parameter 'valeu'"),
        ("{faults}:constant", {"value": {1, 2}}, "args must be numbers, text"),
    ],
)
def test_a_wrong_name_is_refused_at_construction(faults, name, args, expected):
    with pytest.raises(UserError, match=expected):
        runner(name.format(faults=faults), "gsm8k", workers=2, args=args)


def test_a_module_that_ends_its_process_is_refused(tmp_path):
    (tmp_path / "ends.py").write_text("import os\nos._exit(5)\n")
    with pytest.raises(UserError, match="reward functions f do not load: its process ended with exit code 5"):
        runner(f"{tmp_path / 'ends.py'}:f")


def test_a_module_that_never_loads_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("mindrlhf.workers.process.START_TIMEOUT_S", 0.5)
    (tmp_path / "sleeps.py").write_text("import time\ntime.sleep(1000)\n")
    with pytest.raises(UserError, match="do not load: importing them takes longer than"):
        runner(f"{tmp_path / 'sleeps.py'}:f")
