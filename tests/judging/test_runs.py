"""Runs whose rewards come from models: scores, memory, resume and two workers, and the commands that take a reward."""

import json

import jobs
import numpy as np
import pytest
from scoring_models import scoring_config, write_scoring_model

from mindrlhf.configs.grpo import RewardSettings
from mindrlhf.data.tokenizer import Tokenizer
from mindrlhf.metrics.flops import forward_flops
from mindrlhf.rewards.batches import Sample
from mindrlhf.rewards.runner import RewardRunner

REPLICAS = tuple(f"{yaml}_yaml.parallel_config.data_parallel=2" for yaml in ("train", "infer"))
HALVES = tuple(f"{yaml}_yaml.parallel_config.model_parallel=2" for yaml in ("train", "infer"))
SETTINGS = (
    "optimizer.lr=1e-3",
    "train.length_bucket=48",
    "memory.swap=True",
    "trainer.save_freq=1",
    "algorithm.beta=0",
)
ROUNDING = {"rtol": 2e-6, "atol": 1e-6}  # of batches that pad prompts to other lengths, with AVX-512


@pytest.fixture(scope="module")
def task(tmp_path_factory) -> jobs.Task:
    task = jobs.make_task(tmp_path_factory.mktemp("task"), layers=1)
    tokenizer = Tokenizer.from_path(task.folder)
    for name, value_head in (("classifier", True), ("judge", False)):
        config = scoring_config(value_head=value_head, pad_token_id=tokenizer.pad_token_id)
        write_scoring_model(task.folder / name, config, tokenizer=tokenizer)
    return task


def functions(task) -> list[dict]:
    judge = {"name": "judge", "path": f"{task.folder}/judge", "template": "rubric", "words": ["a", "e"]}
    return [{"name": "model", "path": f"{task.folder}/classifier", "weight": 0.5, "max_length": 512}, judge]


def train(task, folder, *settings, workers=None, **flags) -> jobs.Run:
    named = f"reward.functions={json.dumps(functions(task))}"
    arguments = task.train(folder, *SETTINGS, named, *settings, **flags)
    if workers is None:
        assert jobs.call(arguments) == 0
    else:
        jobs.train_apart(arguments, workers)
    return jobs.Run(folder)


@pytest.fixture(scope="module")
def first(task, tmp_path_factory) -> jobs.Run:
    held_out = (f"data.val_dataset={task.folder}/test.mindrecord", "validation.reward=all", "validation.limit=4")
    return train(task, tmp_path_factory.mktemp("first"), *held_out)


def recorded(run: jobs.Run) -> dict[str, np.ndarray]:
    """Rewards by function, of all responses in order."""
    experiences = [experience for _, step in run.rollouts for experience in step]
    return {name: np.concatenate([e.rewards_by_function[name] for e in experiences]) for name in ("model", "judge")}


def steps(run: jobs.Run, name: str) -> np.ndarray:
    """One metric over the steps, without the validation before them."""
    return np.array([row[name] for row in run.metrics if name in row])


def test_rewards_are_the_models_scores(task, first):
    tokenizer, samples = Tokenizer.from_path(task.folder), []
    for _, step in first.rollouts:
        for group in (experience.group for experience in step):
            for rollout in group.rollouts:
                prompt = tokenizer.decode(group.prompt.token_ids)
                samples.append(Sample(prompt, tokenizer.decode(rollout.response_ids, True), group.prompt.fields))
    with RewardRunner(RewardSettings(functions=functions(task))) as runner:
        table = runner.score(samples)
    for name, values in recorded(first).items():
        np.testing.assert_allclose(values, table.by_function[name], **ROUNDING)
        assert np.ptp(values) > 0
    means = steps(first, "critic/rewards/mean")
    np.testing.assert_allclose(means, table.totals.reshape(len(means), -1).mean(1), rtol=1e-6)


def test_memory_is_that_of_the_plan(task, first, capsys):
    named = f"reward.functions={json.dumps(functions(task))}"
    arguments = task.train(first.folder / "plan", *SETTINGS, named)
    assert jobs.call(["plan", *arguments[1:], "--json"]) == 0
    (rank,) = json.loads(capsys.readouterr().out)["ranks"]
    size = rank["roles"]["reward_model"]
    assert size > 2 * 4 * 300 * 32
    assert steps(first, "swap/role_gb/reward_model")[-1] * 2**30 == pytest.approx(size)
    assert rank["phases"]["reward_model"] == {"reward_model": size}
    assert rank["activations"]["reward_model"] > 0
    assert "reward_model" not in rank["phases"]["gen"]
    assert steps(first, "swap/resident_gb/reward_model")[-1] * 2**30 == pytest.approx(size)


@pytest.mark.slow
def test_a_resumed_run_is_the_run_that_never_stopped(task, first, tmp_path):
    train(task, tmp_path, "trainer.total_steps=2")
    resumed = train(task, tmp_path, resume_training="auto")
    assert resumed.responses == first.responses
    assert resumed.weights.keys() == first.weights.keys()
    for name, values in recorded(first).items():
        np.testing.assert_array_equal(recorded(resumed)[name], values)
    for name, weights in first.weights.items():
        np.testing.assert_array_equal(resumed.weights[name], weights)


def test_the_plan_has_operations_of_each_model(task, first, tmp_path, capsys):
    named = f"reward.functions={json.dumps(functions(task))}"
    arguments = task.train(tmp_path, *SETTINGS, named)
    assert jobs.call(["plan", *arguments[1:], "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    prompt = figures["longest_prompt"]
    config = scoring_config()
    assert figures["flops"]["reward_model"] == 4 * 2 * int(forward_flops(config, prompt, [16], 4))
    assert all(0 < share <= 1 for share in steps(first, "perf/mfu"))
    assert all(steps(first, "timing_s/reward_model") > 0)


@pytest.mark.slow
def test_a_second_run_takes_the_models_graphs_from_the_cache(task, tmp_path, capsys):
    """Of a classifier, and of a judge that writes; the policy's graphs do not stand in for the judge's."""
    judge = {"name": "judge", "path": f"{task.folder}/judge", "template": "rubric", "words": ["z", "8"], "weight": 0.0}
    judge |= {"verdict": "generated", "max_length": 256, "max_new_tokens": 8}  # random weights write z and 8
    named = f"reward.functions={json.dumps([functions(task)[0], judge])}"
    rewards = []
    for folder in (tmp_path / "first", tmp_path / "second"):
        capsys.readouterr()
        assert jobs.call(task.train(folder, "trainer.total_steps=1", named)) == 0
        printed = capsys.readouterr().out
        rewards.append(recorded(jobs.Run(folder)))
    assert ", 0 built and kept there\n" in printed
    for name, values in rewards[0].items():
        np.testing.assert_array_equal(rewards[1][name], values)


@pytest.mark.slow
@pytest.mark.msrun
@pytest.mark.parametrize("layout", [REPLICAS, HALVES], ids=["replicas", "halves"])
def test_two_workers_give_the_same_rewards(task, first, tmp_path, layout):
    """Each replica scores its own responses, on its first rank.

    The steps after the first would have weights that differ in their last digits.
    """
    named = f"reward.functions={json.dumps(functions(task)[:1])}"
    run = train(task, tmp_path, *layout, "trainer.total_steps=1", named, workers=2)
    count = len(first.rollouts[0][1]) * 4
    assert run.responses == first.responses[:count]
    (step,) = run.rollouts
    values = np.concatenate([experience.rewards_by_function["model"] for experience in step[1]])
    np.testing.assert_allclose(values, recorded(first)["model"][:count], **ROUNDING)


def test_commands_take_models(task, capsys, tmp_path):
    judge = f"judge path={task.folder}/judge template=rubric words=[a,e]"
    data = ("--data", task.folder / "test.mindrecord")
    written = ("--max_new_tokens", 8, "--output", tmp_path / "answers.jsonl")
    assert jobs.call(["eval", "--model", task.folder / "judge", *data, "--reward", judge, *written]) == 0
    assert json.loads(capsys.readouterr().out)["problems"] == 16
    answers = [json.loads(line)["score"] for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    assert all(0 < score < 1 for score in answers)
    assert np.ptp(answers) > 0
    rows = ("--tokenizer_path", task.folder, "--completion", "4", "--rows", 3)
    models = ("--reward", judge, "--reward", f"model path={task.folder}/classifier")
    assert jobs.call(["reward-check", *data, *rows, *models]) == 0
    printed = capsys.readouterr().out
    assert "judge" in printed
    assert "model" in printed


def test_a_bare_name_is_refused(task, tmp_path, capsys):
    data = ("--data", task.folder / "test.mindrecord")
    assert jobs.call(["eval", "--model", task.folder / "judge", *data, "--reward", "judge"]) == 2
    assert "path is missing" in capsys.readouterr().err
    assert jobs.call(["eval", "--model", task.folder / "judge", *data, "--reward", "judge path=x wrods=1"]) == 2
    assert "wrods" in capsys.readouterr().err
