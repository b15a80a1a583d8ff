"""Sources of experiences: recorded ones, and one that is made up here, of which the loop knows nothing."""

from dataclasses import replace

import jobs
import pytest

from mindrlhf.backend.comm.collectives import Collectives
from mindrlhf.backend.process.launch import World
from mindrlhf.configs.grpo import TrainerSettings
from mindrlhf.run.checkpointer import Checkpointer
from mindrlhf.run.run import Run
from mindrlhf.run.stop_signals import StopSignals
from mindrlhf.trainer import sources
from mindrlhf.trainer.sources import FreshRollouts, RecordedRollouts

SETTINGS = ("optimizer.lr=1e-2", "train.length_bucket=48", "train.max_tokens_per_micro_batch=240")


class OneBehind:
    """Rollouts drawn with the weights of one step before: the next step's are there before an update."""

    def __init__(self, *given):
        self.fresh, self.drawn = FreshRollouts(*given), {}
        self.counters, self.blobs, self.steps = self.fresh.counters, self.fresh.blobs, self.fresh.steps

    @property
    def position(self) -> int:
        return self.fresh.position

    def settle(self):
        return {}  # nothing is drawn during updates

    def collect(self, step):
        for number in range(max(self.drawn, default=step), step + 2):
            if number not in self.drawn:
                experiences, figures = self.fresh.collect(number)
                self.drawn[number] = [replace(e, policy_step=step) for e in experiences], figures
        return self.drawn[step]


def train(task, folder, *settings):
    assert jobs.call(task.train(folder, *SETTINGS, *settings)) == 0
    return jobs.Run(folder)


def tokens(step):
    _, experiences = step
    return [rollout.response_ids.tolist() for e in experiences for rollout in e.group.rollouts]


@pytest.fixture(scope="module")
def fresh(task, tmp_path_factory) -> jobs.Run:
    return train(task, tmp_path_factory.mktemp("fresh"))


@pytest.mark.slow
def test_a_source_one_step_behind_needs_no_other_loop(task, fresh, tmp_path, monkeypatch):
    """Step 2 trains on what the untrained weights say; the update of step 1, on the same as ever, is the same."""
    untrained = train(task, tmp_path / "untrained", "optimizer.lr=0", "trainer.total_steps=2")
    monkeypatch.setattr(sources, "FreshRollouts", OneBehind)
    behind = train(task, tmp_path / "behind")
    assert [{e.policy_step for e in experiences} for _, experiences in behind.rollouts] == [{1}, {1}, {2}]
    assert tokens(behind.rollouts[0]) == tokens(fresh.rollouts[0])
    assert tokens(behind.rollouts[1]) == tokens(untrained.rollouts[1]) != tokens(fresh.rollouts[1])
    assert behind.metrics[0]["actor/grad_norm"] == fresh.metrics[0]["actor/grad_norm"]
    assert behind.metrics[1]["actor/grad_norm"] != fresh.metrics[1]["actor/grad_norm"]


def test_recorded_steps_keep_their_numbers():
    recorded = [(step, [f"experiences of {step}"]) for step in (2, 3, 7)]
    run = Run.__new__(Run)
    run.checkpointer = Checkpointer(TrainerSettings(), 7, None, StopSignals(), Collectives(World(0, 1, "CPU")))
    source = RecordedRollouts(run, recorded)
    assert [(step, *source.collect(step)) for step in source.steps()] == [(*entry, {}) for entry in recorded]
    run.checkpointer._step = 2
    assert list(source.steps()) == [7]
