"""What `metrics.jsonl` says of time, against a clock outside of the run: the moments at which its lines appear."""

import threading
import time

import jobs
import pytest

STEPS = 6


class Watch:
    """Notes, from a thread of its own, when each line of a file is there."""

    def __init__(self, path):
        self.path, self.seen, self.stopped = path, [], threading.Event()
        self.thread = threading.Thread(target=self._look)

    def _look(self):
        while not self.stopped.wait(0.002):
            lines = self.path.read_bytes().count(b"\n") if self.path.exists() else 0
            self.seen += [time.perf_counter()] * (lines - len(self.seen))

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.stopped.set()
        self.thread.join()


@pytest.fixture(scope="module")
def watched(tmp_path_factory):
    """A run with steps of seconds and every file written: its metrics from step 2, and seconds from line to line."""
    folder = tmp_path_factory.mktemp("watched")
    task = jobs.make_task(folder / "task")
    settings = ("rollout.max_new_tokens=128", "rollout.min_new_tokens=128", "rollout.num_generations=8")
    settings = (*settings, "data.prompts_per_step=16", f"trainer.total_steps={STEPS}", "algorithm.beta=0.1")
    loggers = "trainer.loggers=[console,jsonl,tensorboard]"
    arguments = task.train(folder / "run", *settings, loggers)
    with Watch(folder / "run" / "metrics.jsonl") as watch:
        result = jobs.start(arguments)
    assert result.returncode == 0, result.stderr
    rows = jobs.Run(folder / "run").metrics
    assert len(rows) == len(watch.seen) == STEPS
    return rows[1:], [after - before for before, after in zip(watch.seen, watch.seen[1:], strict=False)]


@pytest.mark.slow
def test_the_seconds_of_steps_are_those_of_the_clock(watched):
    """What lies between two steps, the report, its writers and what they record, is in the step behind it."""
    rows, outside = watched
    inside = sum(row["timing_s/step"] for row in rows)
    assert 0.98 * sum(outside) < inside < 1.005 * sum(outside)


@pytest.mark.slow
def test_throughput_is_tokens_by_the_clock(watched):
    rows, outside = watched
    tokens = sum(row["perf/total_num_tokens"] for row in rows)
    seconds = sum(row["perf/total_num_tokens"] / row["perf/throughput"] for row in rows)
    assert tokens / seconds == pytest.approx(tokens / sum(outside), rel=0.02)
    phases = ("report", "gen", "reward", "ref", "adv", "update_actor", "compile")
    for row in rows:
        assert row["timing_s/step"] == pytest.approx(sum(row[f"timing_s/{name}"] for name in phases), rel=0.02)


@pytest.mark.slow
def test_a_report_costs_little(watched):
    """All writers, the rollout record and the metrics themselves; a twentieth where a step is that short."""
    rows, _ = watched
    assert sum(row["timing_s/report"] for row in rows) < 0.05 * sum(row["timing_s/step"] for row in rows)
