"""Runs whose conversations with tools go on across steps: transcript, mask and versions, and the same run anyhow."""

import random
from functools import partial

import jobs
import numpy as np
import phases
import pytest
import versioned_tokens
from split_runs import divided
from versioned_tokens import assert_drawn_by_their_weights

STEPS, NEW, QUOTA = 4, 48, 240
TALK = '''
import random
import time

from mindrlhf.data.tool_formats import ToolCall, ToolFormat


def measure(text: str) -> str:
    """Say how long a text is, and a random number.

    Args:
        text: any text.
    """
    return f"{len(text)} {random.random():.3f}"


def slowly(text: str) -> str:
    """Say the same, late.

    Args:
        text: any text.
    """
    time.sleep(len(text) % 3 / 50)
    return measure(text)


class Measure(ToolFormat):
    """A turn that ends with one of some letters is a call."""

    stop_strings = ("e", "3", "a", "1")
    tool = "measure"

    def parse(self, text):
        return [ToolCall(self.tool, {"text": text})] if text.endswith(self.stop_strings) else []


class Slowly(Measure):
    tool = "slowly"
'''
SETTINGS = (
    *("optimizer.lr=1e-2", "optimizer.eps=1e-5", "train.length_bucket=48", "train.max_tokens_per_micro_batch=480"),
    *("algorithm.beta=0", f"rollout.max_new_tokens={NEW}", "rollout.num_generations=2", "rollout.max_turns=6"),
    *("algorithm.updates_per_iteration=2", f"trainer.total_steps={STEPS}", "trainer.save_freq=1"),
    *("trainer.progress=False", "trainer.loggers=[jsonl]", "rollout_correction.level=token", *jobs.ONE_LAYER),
)
IN_PARTS = ("trainer.staleness=2", f"rollout.tokens_per_step={QUOTA}")


@pytest.fixture(scope="module")
def task(tmp_path_factory) -> jobs.Task:
    task = jobs.make_task(tmp_path_factory.mktemp("task"), layers=1)
    (task.folder / "talk.py").write_text(TALK)
    return task


def argv(task, folder, *settings: str, tool: str = "measure", **flags) -> list[str]:
    file = task.folder / "talk.py"
    tools = (f"rollout.tools=['{file}:{tool}']", f"rollout.tool_format={file}:{tool.capitalize()}")
    return task.train(folder, *SETTINGS, *tools, *settings, **flags)


def rollouts(run: jobs.Run) -> list[list]:
    return [[one for e in experiences for one in e.group.rollouts] for _, experiences in run.rollouts]


def rows(run: jobs.Run) -> list:
    """All that generation knows of each answer."""
    names = ("sampled", "policy_steps", "behaviour_log_probs", "policy_log_probs")
    return [[[one.row(name).tolist() for name in names] for one in step] for step in rollouts(run)]


assert_same = partial(versioned_tokens.assert_same, rows=rows)


@pytest.fixture(scope="module")
def whole(task, tmp_path_factory) -> jobs.Run:
    folder = tmp_path_factory.mktemp("whole")
    assert jobs.call(argv(task, folder, *IN_PARTS)) == 0
    return jobs.Run(folder)


def test_conversations_go_on_across_steps(whole):
    """Each with its transcript, whose replies nothing is learned from, and each token with its version."""
    over_steps = 0
    for step, answers in enumerate(rollouts(whole), 1):
        for one in answers:
            versions = one.row("policy_steps")
            assert (np.diff(versions) >= 0).all()
            assert step - 2 <= versions[0] <= versions[-1] <= step
            assert not one.row("behaviour_log_probs")[~one.sampled].any()
            over_steps += len({*versions[one.sampled]}) > 1 and one.drawn_turns > 1
    assert over_steps > 3
    for row, answers in zip(whole.metrics, rollouts(whole), strict=True):
        turns = [one.num_turns for one in answers]
        assert (row["num_turns/mean"], row["num_turns/max"]) == (pytest.approx(np.mean(turns)), max(turns))
        if row["sample/drawn_tokens"]:
            assert row["conversation/tool_tokens"] > 0
    drawn = sum(int(one.sampled.sum()) for answers in rollouts(whole) for one in answers)
    assert sum(row["sample/drawn_tokens"] for row in whole.metrics) == drawn
    assert whole.metrics[0]["sample/unfinished"] > 0 == whole.metrics[-1]["sample/unfinished"]


def test_every_token_has_the_probability_of_the_weights_of_its_step(task, whole):
    """Behind the tools' answers too."""
    assert assert_drawn_by_their_weights(task, whole, STEPS) > 50


@pytest.mark.msrun
def test_ranks_apart_hold_the_same_conversations(task, whole, tmp_path):
    jobs.train_apart(argv(task, tmp_path, *IN_PARTS, **divided(1, 1)), 2, timeout=400)
    assert_same(jobs.Run(tmp_path), whole)


@pytest.mark.slow
@pytest.mark.parametrize("case", range(6))
def test_killed_anywhere(task, whole, tmp_path, case):
    """The requests of tools that draw random numbers go on with theirs."""
    rng = random.Random(f"conversations {case}")
    command = argv(task, tmp_path / "run", *IN_PARTS, resume_training="auto")
    for step in sorted(rng.sample(range(1, STEPS + 1), 2)):
        phase = rng.choice(("generate", "update", "save", "report"))
        phases.kill_in(command, tmp_path / "phases", phase, step, rng)
    phases.to_the_end(command, tmp_path / "phases")
    assert_same(jobs.Run(tmp_path / "run"), whole)


@pytest.mark.slow
@pytest.mark.parametrize("setting", ["rollout.max_slots=3", "rollout.tool_workers=1"])
def test_slots_and_the_speed_of_tools_change_no_token(task, whole, tmp_path, setting):
    assert jobs.call(argv(task, tmp_path, *IN_PARTS, setting, tool="slowly")) == 0
    run = jobs.Run(tmp_path)
    assert run.responses == whole.responses
    assert [[row[:2] for row in step] for step in rows(run)] == [[row[:2] for row in step] for step in rows(whole)]


@pytest.mark.slow
def test_a_quota_that_no_batch_fills_is_the_staleness_itself(task, tmp_path):
    behind, parts = tmp_path / "behind", tmp_path / "parts"
    assert jobs.call(argv(task, behind, "trainer.staleness=2")) == 0
    assert jobs.call(argv(task, parts, "trainer.staleness=2", "rollout.tokens_per_step=100000")) == 0
    ours, theirs = jobs.Run(parts), jobs.Run(behind)
    assert ours.responses == theirs.responses
    for name, array in ours.weights.items():
        np.testing.assert_array_equal(array, theirs.weights[name])


@pytest.mark.slow
def test_greedy_conversations_are_held_whole_between_parts(task, whole, tmp_path):
    """They end no conversation of a later batch."""
    assert jobs.call(argv(task, tmp_path, *IN_PARTS, "algorithm.advantage=remax")) == 0
    run = jobs.Run(tmp_path)
    experiences = [e for _, step in run.rollouts for e in step]
    assert all(np.isfinite([e.greedy_reward, *e.rewards]).all() for e in experiences)
    first, expected = ([row for row in one.responses if row[0] == 1] for one in (run, whole))
    assert first == expected
    spans = [len({*one.row("policy_steps")}) for step in rollouts(run) for one in step if one.drawn_turns > 1]
    assert max(spans) > 1


@pytest.mark.slow
@pytest.mark.msrun
@pytest.mark.parametrize("layout", ["dp2", "tp2"])
def test_two_ranks_hold_the_same_conversations(task, whole, tmp_path, layout):
    layouts = (*jobs.layout("train", layout), *jobs.layout("infer", layout))
    jobs.train_apart(argv(task, tmp_path, *IN_PARTS, *layouts), 2, timeout=400)
    run = jobs.Run(tmp_path)
    assert run.responses == whole.responses
    assert [[row[:2] for row in step] for step in rows(run)] == [[row[:2] for row in step] for step in rows(whole)]
