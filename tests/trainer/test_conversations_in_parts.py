"""Runs whose conversations go on across steps: transcript, mask, versions, rewards, and the same run anyhow."""

import math
import random
import runpy
from functools import partial

import jobs
import numpy as np
import phases
import pytest
import versioned_tokens
from slow_cases import few_of
from split_runs import divided
from versioned_tokens import assert_drawn_by_their_weights

from mindrlhf.data.tokenizer import Tokenizer
from mindrlhf.rollout.partner import Begun

STEPS, NEW, QUOTA = 4, 48, 240
MAX_TURNS = 6
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


class Listener:
    """Says how long turns are, with random numbers of its own and of the process; ends with a turn of some lengths."""

    late = 0.0

    def reset(self, seed: str, question: str = ""):
        self.own = random.Random(seed)
        self.lengths = []
        return f" ({self.own.randrange(10)})" if int(seed) % 2 else None

    def reply(self, text: str):
        time.sleep(self.late * (len(text) % 3))
        self.lengths.append(len(text))
        over = len(text) % 6 == 5
        return None if over else f"{len(text)} {self.own.randrange(10)} {random.random():.3f}"

    def get_reward(self):
        return sum(self.lengths) / 100 + self.own.random()

    def get_turn_rewards(self):
        return [length / 1000 for length in self.lengths]


class Late(Listener):
    late = 0.02
'''
SETTINGS = (
    *("optimizer.lr=1e-2", "optimizer.eps=1e-5", "train.length_bucket=48", "train.max_tokens_per_micro_batch=480"),
    *(
        "algorithm.beta=0",
        f"rollout.max_new_tokens={NEW}",
        "rollout.num_generations=2",
        f"rollout.max_turns={MAX_TURNS}",
    ),
    *("algorithm.updates_per_iteration=2", f"trainer.total_steps={STEPS}", "trainer.save_freq=1"),
    *("trainer.progress=False", "trainer.loggers=[jsonl]", "rollout_correction.level=token", *jobs.ONE_LAYER),
)
IN_PARTS = ("trainer.staleness=2", f"rollout.tokens_per_step={QUOTA}")


@pytest.fixture(scope="module", params=few_of(["environment"], ["tool"]))
def partner(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def task(partner, tmp_path_factory) -> jobs.Task:
    """An environment's first text goes to the end of a chat's question."""
    template = "chat" if partner == "environment" else "plain"
    task = jobs.make_task(tmp_path_factory.mktemp("task"), layers=1, template=template)
    (task.folder / "talk.py").write_text(TALK)
    return task


def argv(task, folder, *settings: str, partner: str, slowly: bool = False, **flags) -> list[str]:
    """A command. partner: `tool` or `environment`."""
    file = task.folder / "talk.py"
    if partner == "tool":
        tool = "slowly" if slowly else "measure"
        talk = (f"rollout.tools=['{file}:{tool}']", f"rollout.tool_format={file}:{tool.capitalize()}")
    else:
        environment = f"{file}:{'Late' if slowly else 'Listener'}"
        rewards = f"[{{name: '{task.folder}/reward.py:variety'}}, {{name: environment}}]"
        talk = (f"rollout.environment={environment}", "rollout.stop_strings=['e','3','a','1']")
        talk = (*talk, f"reward.functions={rewards}")
    return task.train(folder, *SETTINGS, *talk, *settings, **flags)


def rollouts(run: jobs.Run) -> list[list]:
    return [[one for e in experiences for one in e.group.rollouts] for _, experiences in run.rollouts]


def rows(run: jobs.Run) -> list:
    """All that generation knows of each answer."""
    names = ("sampled", "policy_steps", "behaviour_log_probs", "policy_log_probs")
    return [[[one.row(name).tolist() for name in names] for one in step] for step in rollouts(run)]


assert_same = partial(versioned_tokens.assert_same, rows=rows)


@pytest.fixture(scope="module")
def command(task, partner):
    """`argv` with the partner."""
    return partial(argv, task, partner=partner)


@pytest.fixture(scope="module")
def whole(command, tmp_path_factory) -> jobs.Run:
    folder = tmp_path_factory.mktemp("whole")
    assert jobs.call(command(folder, *IN_PARTS)) == 0
    return jobs.Run(folder)


def test_conversations_go_on_across_steps(partner, whole):
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
            assert row[f"conversation/{'tool' if partner == 'tool' else 'user'}_tokens"] > 0
        assert row["conversation/lost"] == 0
    drawn = sum(int(one.sampled.sum()) for answers in rollouts(whole) for one in answers)
    assert sum(row["sample/drawn_tokens"] for row in whole.metrics) == drawn
    assert whole.metrics[0]["sample/unfinished"] > 0 == whole.metrics[-1]["sample/unfinished"]


def test_every_token_has_the_probability_of_the_weights_of_its_step(task, whole):
    """Behind the tools' answers too."""
    assert assert_drawn_by_their_weights(task, whole, STEPS) > 50


def test_replies_and_rewards_are_those_of_an_environment_that_nobody_interrupts(task, partner, whole):
    """Of each conversation, from its transcript alone: the same class, called here from the first turn to the last."""
    if partner == "tool":
        pytest.skip("tools have no state")
    talk = runpy.run_path(str(task.folder / "talk.py"))["Listener"]
    tokenizer = Tokenizer.from_path(task.folder)
    turns = 0
    for step, experiences in whole.rollouts:
        for e in experiences:
            for i, one in enumerate(e.group.rollouts):
                random.seed(" ".join(map(str, (0, step, one.prompt_id, e.group.prompt.occurrence, i))))
                environment = talk()
                opening = environment.reset(str(one.prompt_id))
                begun = Begun(e.group.prompt, one, step, ended=turn_ended(tokenizer, one))
                assert len(begun.opening) > 0 if opening else len(begun.opening) == 0
                for number, (first, end) in enumerate(begun.turns):
                    said = environment.reply(tokenizer.decode(one.response_ids[first:end], skip_special_tokens=True))
                    heard = tokenizer.decode(begun.reply_to(number))
                    if said is None or number + 1 == MAX_TURNS:
                        assert not heard
                    elif end + len(begun.reply_to(number)) < NEW:
                        assert said in heard
                    turns += 1
                rewards = environment.get_turn_rewards()
                total = math.fsum([environment.get_reward(), *rewards])
                assert e.rewards_by_function["environment"][i] == pytest.approx(total, abs=1e-12)
                ends = [end - 1 for _, end in begun.turns]
                np.testing.assert_array_equal(np.flatnonzero(~np.isnan(one.row("turn_rewards"))), ends)
                np.testing.assert_allclose(one.row("turn_rewards")[ends], rewards, rtol=1e-6)
    assert turns > 30


def turn_ended(tokenizer, one) -> bool:
    """Whether the last turn ended by itself, although the answer is full."""
    text = tokenizer.decode(one.response_ids[one.turn_first :])
    return one.finish_reason != "length" or any(stop in text for stop in ("e", "3", "a", "1"))


@pytest.mark.slow
@pytest.mark.msrun
def test_ranks_apart_hold_the_same_conversations(command, whole, tmp_path):
    jobs.train_apart(command(tmp_path, *IN_PARTS, **divided(1, 1)), 2, timeout=400)
    assert_same(jobs.Run(tmp_path), whole)


@pytest.mark.slow
@pytest.mark.parametrize("case", range(6))
def test_killed_anywhere(command, whole, tmp_path, case):
    """The requests of tools that draw random numbers go on with theirs."""
    rng = random.Random(f"conversations {case}")
    words = command(tmp_path / "run", *IN_PARTS, resume_training="auto")
    phases.kill_twice(words, tmp_path / "phases", STEPS, rng)
    assert_same(jobs.Run(tmp_path / "run"), whole)


@pytest.mark.slow
@pytest.mark.parametrize("setting", ["rollout.max_slots=3", "rollout.tool_workers=1"])
def test_slots_and_the_speed_of_tools_change_no_token(command, whole, tmp_path, setting):
    assert jobs.call(command(tmp_path, *IN_PARTS, setting, slowly=True)) == 0
    run = jobs.Run(tmp_path)
    assert run.responses == whole.responses
    assert [[row[:2] for row in step] for step in rows(run)] == [[row[:2] for row in step] for step in rows(whole)]


@pytest.mark.slow
def test_a_quota_that_no_batch_fills_is_the_staleness_itself(command, tmp_path):
    behind, parts = tmp_path / "behind", tmp_path / "parts"
    assert jobs.call(command(behind, "trainer.staleness=2")) == 0
    assert jobs.call(command(parts, "trainer.staleness=2", "rollout.tokens_per_step=100000")) == 0
    ours, theirs = jobs.Run(parts), jobs.Run(behind)
    assert ours.responses == theirs.responses
    for name, array in ours.weights.items():
        np.testing.assert_array_equal(array, theirs.weights[name])


@pytest.mark.slow
def test_greedy_conversations_are_held_whole_between_parts(command, whole, tmp_path):
    """They end no conversation of a later batch."""
    assert jobs.call(command(tmp_path, *IN_PARTS, "algorithm.advantage=remax")) == 0
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
def test_two_ranks_hold_the_same_conversations(command, whole, tmp_path, layout):
    layouts = (*jobs.layout("train", layout), *jobs.layout("infer", layout))
    jobs.train_apart(command(tmp_path, *IN_PARTS, *layouts), 2, timeout=400)
    run = jobs.Run(tmp_path)
    assert run.responses == whole.responses
    assert [[row[:2] for row in step] for step in rows(run)] == [[row[:2] for row in step] for step in rows(whole)]
