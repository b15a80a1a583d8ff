"""GRPO with environments: conversations in every step, their rewards and counts, replays, and held-out problems."""

import jobs
import numpy as np
import pytest
from workers import run_ranks

from mindrlhf.environments.conversations import Conversations
from mindrlhf.evaluation.pass_at_k import read_answers

ENVIRONMENT = '''
import random
import time


class Counter:
    """Says how long a turn was, three times; some rows begin with a word of its own."""

    def reset(self, question: str, seed: str) -> str | None:
        self.question, self.turns = question, []
        return "ready?" if int(seed) % 2 else None

    def reply(self, text: str) -> str | None:
        self.turns.append(text)
        return None if len(self.turns) == 3 else f"{len(text)} of {len(self.question)}"

    def get_reward(self) -> float:
        return len(self.turns) + len(set("".join(self.turns))) / 100

    def get_turn_rewards(self) -> list[float]:
        return [len(turn) / 1000 for turn in self.turns]


class Sleeper(Counter):
    """Takes up to 500 ms for an answer, by what it hears."""

    def reply(self, text: str) -> str | None:
        time.sleep(random.Random(f"{len(self.turns)} {text}").random() / 2)
        return super().reply(text)
'''
SETTINGS = (
    "rollout.max_new_tokens=64",
    "rollout.stop_strings=[e, '3', a, '1']",
    "algorithm.beta=0.1",
    "algorithm.advantage=reinforce_plus_plus",
    "optimizer.lr=1e-3",
    "optimizer.eps=1e-5",
    "trainer.total_steps=2",
)
SAME = ("actor/loss", "actor/kl_loss", "actor/grad_norm", "actor/entropy", "critic/rewards/mean")


def settings(folder) -> tuple[str, ...]:
    functions = f"reward.functions=[{{name: environment}}, {{name: '{folder}/reward.py:variety', weight: 0.1}}]"
    return *SETTINGS, functions, f"rollout.environment={folder}/counter.py:Counter"


@pytest.fixture(scope="module")
def task(tmp_path_factory) -> jobs.Task:
    task = jobs.make_task(tmp_path_factory.mktemp("task"), layers=1)
    (task.folder / "counter.py").write_text(ENVIRONMENT)
    return task


@pytest.fixture(scope="module")
def first(task, tmp_path_factory) -> jobs.Run:
    folder = tmp_path_factory.mktemp("first")
    problems = f"data.val_dataset={task.folder}/test.mindrecord"
    drawn = ("validation.reward=environment", "validation.temperature=1.0")
    held_out = (problems, "trainer.test_freq=1", "trainer.val_before_train=False", *drawn)
    assert jobs.call(task.train(folder, *settings(task.folder), *held_out)) == 0
    return jobs.Run(folder)


def test_a_run_with_an_environment(first):
    rollouts = [one for _, step in first.rollouts for e in step for one in e.group.rollouts]
    rewards = np.concatenate([e.rewards_by_function["environment"] for _, step in first.rollouts for e in step])
    # A turn of its own at the end, or one that was cut off.
    turns = [np.count_nonzero(np.diff(one.sampled.astype(int), prepend=0) > 0) for one in rollouts]
    assert max(turns) == 3
    assert all(reward // 1 in (count, count - 1) for reward, count in zip(rewards, turns, strict=True))
    assert {one.finish_reason for one in rollouts} >= {"stop", "length"}
    for one, reward in zip(rollouts, rewards, strict=True):
        places = np.flatnonzero(~np.isnan(one.row("turn_rewards")))
        assert len(places) == reward // 1
        for place in places:
            assert one.sampled[place]
            assert place + 1 == len(one.sampled) or not one.sampled[place + 1]
    for _, step in first.rollouts:
        drawn = [2 * one.drawn_turns for e in step for one in e.group.rollouts]
        row = next(row for row in first.metrics if row["num_turns/mean"] == pytest.approx(np.mean(drawn)))
        assert (row["num_turns/min"], row["num_turns/max"]) == (min(drawn), max(drawn))
    for row in first.metrics:
        assert row["rollout_corr/log_prob_diff/max"] < 1e-4
        assert 1 < row["conversation/turns"] <= 3
        assert row["conversation/user_tokens"] > 1
        assert row["tools/failure_frequency"] == row["conversation/lost"] == 0
        assert row["reward/environment/mean"] > 1
        assert row["conversation/tool_tokens"] == 0
        assert row["val-aux/arithmetic/response_length/mean"] > 3


@pytest.mark.slow
def test_greedy_conversations_begin_as_the_others(tmp_path, monkeypatch):
    """An environment's first text stands at the end of the question, which groups no longer have."""
    task = jobs.make_task(tmp_path, layers=1, template="chat")
    (task.folder / "counter.py").write_text(ENVIRONMENT)
    begin = Conversations.begin
    begun = {}

    def noted(self, prompts, num_generations, step):
        opened, replies = begin(self, prompts, num_generations, step)
        for row, reply in enumerate(replies):
            prompt = opened[row // num_generations]
            begun.setdefault(num_generations, {})[prompt.id] = [*prompt.token_ids.tolist(), *reply.token_ids.tolist()]
        return opened, replies

    monkeypatch.setattr(Conversations, "begin", noted)
    own = ("algorithm.advantage=remax", "algorithm.beta=0", "trainer.total_steps=1")
    assert jobs.call(task.train(tmp_path, *settings(task.folder), *own)) == 0
    assert len(begun[1]) == 4
    assert begun[1] == begun[4]


def test_held_out_problems(first):
    """As training counts them: two for each that the environment was given, two more for one that was cut off."""
    for row in first.metrics:
        answers = read_answers(first.folder / "validation" / f"step_{row['step']:06d}.jsonl")
        (right,) = (row[name] for name in row if name.startswith("val-core/"))
        assert right == np.mean([answer.score >= 1 for answer in answers]) > 0, "the environment gives the rewards"
        turns = [answer.num_turns for answer in answers]
        assert 2 < max(turns) <= 6
        for answer in answers:
            more = answer.num_turns - 2 * int(answer.score)
            assert more == 0 or (more == 2 and answer.truncated), answer
        found = {name: row[f"val-aux/num_turns/{name}"] for name in ("mean", "max", "min")}
        assert found == {"mean": pytest.approx(np.mean(turns)), "max": max(turns), "min": min(turns)}


def test_a_replay_of_conversations_gives_the_same_update(task, first, tmp_path):
    replay = {"replay": first.folder / "rollouts.mindrecord", "mind_dataset_dir": None, "save_data_file": None}
    assert jobs.call(task.train(tmp_path, *settings(task.folder), **replay)) == 0
    replayed = jobs.Run(tmp_path)
    for name in SAME:
        assert replayed.column(name).tolist() == first.column(name).tolist(), name
    for name, expected in first.weights.items():
        assert replayed.weights[name].tobytes() == expected.tobytes(), name


@pytest.mark.slow
@pytest.mark.msrun
@pytest.mark.parametrize("axis", ["data_parallel", "model_parallel"])
def test_two_workers_have_the_same_conversations(task, first, tmp_path, axis):
    """However long the environment takes, in few slots."""
    ranks = (f"train_yaml.parallel_config.{axis}=2", f"infer_yaml.parallel_config.{axis}=2", "trainer.total_steps=1")
    slow = (f"rollout.environment={task.folder}/counter.py:Sleeper", "rollout.max_slots=5")
    arguments = task.train(tmp_path, *settings(task.folder), *slow, *ranks)
    result = run_ranks(2, [jobs.ONE_STAGE, *arguments[1:]])
    assert result.returncode == 0, result.logs
    run = jobs.Run(tmp_path)
    assert run.responses == first.responses[: len(run.responses)]
    for name in ("critic/rewards/mean", "conversation/turns", "tools/call_frequency"):
        assert run.column(name)[0] == pytest.approx(first.column(name)[0], rel=1e-5)
