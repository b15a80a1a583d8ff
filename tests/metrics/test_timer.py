import time

import pytest

from mindrlhf.metrics.timer import Timers


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_phases_nest_add_up_and_start_anew():
    clock = Clock()
    timers = Timers(clock=clock)
    with timers("step"):
        for seconds in (1.0, 2.0):
            with timers("gen"):
                clock.now += seconds
                with timers("prefill"):
                    clock.now += 0.5
        clock.now += 0.25
    assert timers.collect() == {"prefill": 1.0, "gen": 3.0, "compile": 0.0, "step": 4.25}
    assert timers.collect() == {}


def test_a_phase_inside_itself_counts_once():
    clock = Clock()
    timers = Timers(clock=clock)
    with timers("gen"):
        clock.now += 1
        with timers("gen"):
            clock.now += 1
    assert timers.collect() == {"gen": 2.0, "compile": 0.0}


def test_compile_seconds_are_apart_and_everything_adds_up_to_the_step():
    clock, compiling = Clock(), Clock()
    timers = Timers(compiling, clock=clock)
    compiling.now += 100.0
    with timers("step"):
        with timers("gen"):
            clock.now += 1
        with timers("update_actor"), timers("forward"):
            clock.now += 10
            compiling.now += 7.0
        with timers("reward"):
            clock.now += 4
            compiling.now += 1.0
            with timers("reward_model"):
                clock.now += 6
                compiling.now += 2.0
    seconds = timers.collect()
    phases = {"gen": 1.0, "forward": 3.0, "update_actor": 0.0, "reward": 3.0, "reward_model": 4.0}
    assert seconds == {**phases, "compile": 10.0, "step": 21.0}
    assert sum(phases.values()) + seconds["compile"] == seconds["step"]


def test_time_of_a_block_that_raises_is_kept():
    clock = Clock()
    timers = Timers(clock=clock)

    def fail():
        clock.now += 2
        raise RuntimeError

    with pytest.raises(RuntimeError), timers("gen"):
        fail()
    timers.add("gen", 0.5)
    with timers("gen"):
        clock.now += 1
    assert timers.collect() == {"gen": 3.5, "compile": 0.0}


def test_agrees_with_an_outside_stopwatch():
    timers = Timers()
    start = time.perf_counter()
    with timers("gen"):
        time.sleep(0.3)
    outside = time.perf_counter() - start
    assert 0.3 <= timers.collect()["gen"] <= outside  # whatever else the machine does
