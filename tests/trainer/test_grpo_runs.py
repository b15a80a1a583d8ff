"""Single GRPO runs in this process: reward functions of one's own, and numbers that go wrong."""

import json
import zlib

import jobs
import numpy as np
import pytest

from mindrlhf.data.convert_problems import convert
from mindrlhf.data.tokenizer import Tokenizer
from mindrlhf.metrics.writers import read_metrics

SMALL = (*jobs.ONE_LAYER, "train.length_bucket=48", "algorithm.beta=0")  # graphs that these runs share

FUNCTIONS = """
def picky(prompt, completion, fields):
    if len(completion) % 2:
        raise ValueError("an odd number of characters")
    return 1.0 if completion > "P" else 0.0


def shown(prompt, completion, fields):
    assert fields["task"] == "arithmetic" and prompt.startswith(fields["question"]), (prompt, fields)
    return {"score": len(completion) / 100, "length": len(completion)}
"""


def run(task: jobs.Task, folder, *settings: str, **flags) -> jobs.Run:
    assert jobs.call(task.train(folder, *SMALL, *settings, **flags)) == 0
    return jobs.Run(folder)


def test_reward_functions_of_a_file(task, tmp_path, caplog):
    """One of two functions raises for about half of the samples: those have no reward; it is counted and shown once."""
    (tmp_path / "functions.py").write_text(FUNCTIONS)
    picky, shown = (f"name: '{tmp_path}/functions.py:{name}'" for name in ("picky", "shown"))
    functions = f"reward.functions=[{{{picky}, weight: 2}}, {{{shown}}}]"
    settings = (functions, "trainer.save_rollouts=True", "trainer.total_steps=2")
    result = run(task, tmp_path / "out", *settings)
    tokenizer = Tokenizer.from_path(task.folder)
    failed = 0
    for (step, experiences), row in zip(result.rollouts, result.metrics, strict=True):
        texts = [
            tokenizer.decode(rollout.response_ids.tolist(), skip_special_tokens=True)
            for experience in experiences
            for rollout in experience.group.rollouts
        ]
        odd = np.array([len(text) % 2 == 1 for text in texts])
        failed += odd.sum()
        picky = np.array([text > "P" for text in texts], np.float32)
        shown = np.array([len(text) for text in texts]) / 100
        rewards = np.concatenate([experience.rewards for experience in experiences])
        np.testing.assert_allclose(rewards, np.where(odd, np.nan, 2 * picky + shown), rtol=1e-6)
        by_function = np.concatenate([experience.rewards_by_function["picky"] for experience in experiences])
        assert np.isnan(by_function).tolist() == odd.tolist()
        assert row["reward/picky/failures"] == row["reward/picky/missing"] == odd.sum()
        assert row["reward/shown/failures"] == 0
        assert row["reward/unscored"] == odd.sum()
        assert row["critic/rewards/mean"] == pytest.approx(np.nanmean(rewards))
        assert row["reward/picky/mean"] == pytest.approx(picky[~odd].mean())
        dumped = sorted((tmp_path / "out" / "rollouts").iterdir())[step - 1]
        assert len(dumped.read_text().splitlines()) == len(texts)
        assert json.loads(dumped.read_text().splitlines()[0])["step"] == step
    assert 0 < failed < 32
    assert caplog.text.count("an odd number of characters") == 1


def test_prompts_without_ground_truths(task, tmp_path, capsys):
    """Generated, recorded and replayed where no reward compares; refused before the run where one does."""
    source, data = tmp_path / "open.jsonl", tmp_path / "open.mindrecord"
    source.write_text("".join(json.dumps({"question": f"Write {n} words."}) + "\n" for n in range(8)))
    convert(source, data, Tokenizer.from_path(task.folder), task="fields", template="plain", progress=False)
    settings = ("trainer.total_steps=1", "trainer.save_rollouts=True")
    result = run(task, tmp_path / "out", *settings, mind_dataset_dir=data)
    dumped = json.loads((tmp_path / "out" / "rollouts" / "step_000001.jsonl").read_text().splitlines()[0])
    assert dumped["ground_truth"] is None
    recorded = tmp_path / "out" / "rollouts.mindrecord"
    replayed = run(task, tmp_path / "again", *settings, replay=recorded, mind_dataset_dir=None, save_data_file=None)
    assert replayed.metrics[0]["actor/loss"] == result.metrics[0]["actor/loss"]
    comparing = task.train(tmp_path / "refused", *settings, "reward.functions=[{name: math}]", mind_dataset_dir=data)
    assert jobs.call(comparing) == 2
    assert "row 0 has no ground truth, and the reward function 'math' compares" in capsys.readouterr().err


TROUBLES = """
import time, zlib


def hit(completion):
    return zlib.crc32(completion.encode()) % 4 == 0


def sleeps(prompt, completion, fields):
    while hit(completion):
        time.sleep(1000)
    return 0.25


def raises(prompt, completion, fields):
    return 1 / (not hit(completion))


def nothing(prompt, completion, fields):
    return float("nan") if hit(completion) else 0.5


def prints(prompt, completion, fields):
    if hit(completion):
        print("x" * 10_000_000)
    return len(completion) / 100
"""


def test_reward_functions_that_hang_raise_give_nan_and_print(task, tmp_path):
    """The run goes on within the timeout; each fault costs its sample's reward and nothing else."""
    (tmp_path / "troubles.py").write_text(TROUBLES)
    names = ("sleeps", "raises", "nothing", "prints")
    functions = ", ".join(f"{{name: '{tmp_path}/troubles.py:{name}'}}" for name in names)
    settings = (f"reward.functions=[{functions}]", "reward.timeout_s=0.5", "trainer.total_steps=1")
    result = run(task, tmp_path / "out", *settings)
    tokenizer = Tokenizer.from_path(task.folder)
    total = 0
    for (_, experiences), row in zip(result.rollouts, result.metrics, strict=True):
        rollouts = [rollout for experience in experiences for rollout in experience.group.rollouts]
        texts = [tokenizer.decode(rollout.response_ids.tolist(), skip_special_tokens=True) for rollout in rollouts]
        hit = np.array([zlib.crc32(text.encode()) % 4 == 0 for text in texts])
        total += hit.sum()
        expected = np.where(hit, np.nan, 0.25 + 1 + 0.5 + np.array([len(text) for text in texts]) / 100)
        rewards = np.concatenate([experience.rewards for experience in experiences])
        np.testing.assert_allclose(rewards, expected, rtol=1e-6)
        assert row["reward/sleeps/timeouts"] == hit.sum()
        for name in names:
            assert row[f"reward/{name}/failures"] == (hit.sum() if name in ("raises", "nothing") else 0)
        assert row["actor/grad_norm"] > 0
    assert 1 < total < 12


@pytest.mark.slow
def test_a_reward_function_that_fails_for_every_sample(task, tmp_path):
    """Nothing can be learnt: the weights stay, and the run says so in its metrics."""
    code = "def broken(prompt, completion, fields):\n    return 1 / (completion == fields['ground_truth'])\n"
    (tmp_path / "functions.py").write_text(code)
    functions = f"reward.functions=[{{name: '{tmp_path}/functions.py:broken'}}]"
    settings = (functions, "trainer.total_steps=1", "optimizer.weight_decay=0", "optimizer.lr=1e-2")
    result = run(task, tmp_path / "out", *settings)
    row = result.metrics[0]
    assert row["reward/broken/failures"] == 16
    assert row["group/zero_std_fraction"] == 1
    assert row["actor/grad_norm"] == row["actor/loss"] == 0
    assert "critic/rewards/mean" not in row
    assert all(np.isnan(experience.rewards).all() for _, step in result.rollouts for experience in step)
    assert (result.weights["model.layers.0.self_attn.q_proj.bias"] == 0).all()  # as they began


@pytest.mark.parametrize("rate", ["1e30", pytest.param("1e38", marks=pytest.mark.slow)])
def test_a_learning_rate_beyond_all_reason(task, tmp_path, rate):
    """The first update throws the weights far away; what is not finite after it is skipped and counted."""
    result = run(task, tmp_path, f"optimizer.lr={rate}", "trainer.total_steps=3")
    assert [row["step"] for row in result.metrics] == [1, 2, 3]
    assert all(np.isfinite(tensor).all() for tensor in result.weights.values())
    skipped, norms = result.column("actor/skipped_updates"), result.column("actor/grad_norm")
    assert skipped.tolist() == (~np.isfinite(norms)).astype(float).tolist()
    assert skipped[0] == 0
    assert skipped.sum() > 0


# The optimizer's own factor of it is beyond float32.
TOO_FAST = "optimizer.lr=3e38"


def test_weights_that_are_not_finite_replace_no_good_ones(task, tmp_path, capsys):
    """Neither the checkpoint of the step before nor the model of an earlier run in this folder."""
    good = run(task, tmp_path, "trainer.total_steps=1", "trainer.save_freq=1")
    before = jobs.files(tmp_path / "ckpt")
    again = ("trainer.total_steps=2", "trainer.save_freq=1", TOO_FAST, "trainer.resume_mode=auto")
    assert jobs.call(task.train(tmp_path, *SMALL, *again)) == 2
    told = capsys.readouterr().err
    assert "step 2: the model's parameter model." in told
    assert "(step_000001 is whole, and --resume_training auto continues from it)" in told
    assert jobs.files(tmp_path / "ckpt") == before
    assert all(np.isfinite(tensor).all() for tensor in good.weights.values())


@pytest.mark.parametrize("command", ["train", "sft"])
def test_a_model_that_is_not_finite_is_not_written(task, tmp_path, capsys, command):
    arguments = task.train(tmp_path, *SMALL) if command == "train" else task.sft(tmp_path, *SMALL[:1], SMALL[2])
    assert jobs.call([*arguments, "trainer.total_steps=1", TOO_FAST]) == 2
    told = capsys.readouterr().err
    assert "holds NaN or infinity, so nothing is written over what was saved before" in told
    assert "Traceback" not in told
    assert not (tmp_path / "ckpt" / "hf").exists()


def test_a_prompt_that_comes_twice_in_a_step_gets_other_answers(task, tmp_path):
    """Three problems and four prompts a step: an epoch ends in each. The record of it trains to the same weights."""
    lines = (task.folder / "train.jsonl").read_text().splitlines(keepends=True)[:3]
    (tmp_path / "three.jsonl").write_text("".join(lines))
    files = ("--file_path", tmp_path / "three.jsonl", "--output_path", tmp_path / "three.mindrecord")
    kind = ("--tokenizer_path", task.folder, "--dataset_type", "arithmetic", "--template", "plain")
    assert jobs.call(["data", *files, *kind]) == 0
    steps = "trainer.total_steps=2"
    made = run(task, tmp_path / "made", steps, mind_dataset_dir=tmp_path / "three.mindrecord")
    for _, experiences in made.rollouts:
        assert len(experiences) == 4
        answers = {}
        for experience in experiences:
            said = tuple(tuple(one.response_ids.tolist()) for one in experience.group.rollouts)
            answers.setdefault(experience.group.prompt.id, []).append(said)
        first, again = next(given for given in answers.values() if len(given) > 1)
        assert not set(first) & set(again)
    record = {"replay": made.folder / "rollouts.mindrecord", "mind_dataset_dir": None, "save_data_file": None}
    replayed = run(task, tmp_path / "replayed", steps, **record)
    for name, tensor in made.weights.items():
        np.testing.assert_array_equal(replayed.weights[name], tensor)
    one = run(task, tmp_path / "one", "trainer.total_steps=1", **record)
    assert [row["step"] for row in one.metrics] == [1], "a replay ends where it is told to"


def test_a_step_without_a_group_to_learn_from_moves_nothing(task, tmp_path):
    """Dynamic sampling finds no spread in two steps: weights, moments and the optimizer's counter stay as they were."""
    reward = tmp_path / "reward.py"
    reward.write_text(jobs.REWARD)
    functions = f"reward.functions=[{{name: '{reward}:variety'}}]"
    dapo = ("dynamic_sampling.enabled=True", "dynamic_sampling.max_rounds=1")
    saving = ("trainer.save_freq=1", "trainer.resume_mode=auto", "optimizer.lr=1e-2", "optimizer.weight_decay=0.5")
    settings = (*dapo, *saving, functions)
    first = run(task, tmp_path, *settings, "trainer.total_steps=1")
    assert first.column("actor/empty_updates").tolist() == [0]
    reward.write_text("def variety(prompt, completion, fields):\n    return 1.0\n")
    result = run(task, tmp_path, *settings, "trainer.total_steps=3")
    assert result.column("actor/empty_updates").tolist() == [0, 1, 1]
    assert result.column("actor/skipped_updates").tolist() == [0, 0, 0]
    before, after = (jobs.files(tmp_path / "ckpt" / f"step_{step:06d}" / "rank_0") for step in (1, 3))
    assert len(before) == 3
    assert list(before.values()) == list(after.values())
    states = [json.loads((tmp_path / "ckpt" / f"step_{step:06d}" / "state.json").read_text()) for step in (1, 3)]
    assert [state["counters"]["optimizer"]["updates"] for state in states] == [1, 1]


def test_what_is_exported_stops_and_samples_as_it_should(task, tmp_path):
    """Both configurations have the tokens that ended answers in training; a card says where it came from."""
    given = {"do_sample": True, "temperature": 0.7, "top_p": 0.8, "eos_token_id": 5}
    source = tmp_path / "Tiny-Instruct"
    jobs.write_model(task, source, num_layers=1)
    (source / "generation_config.json").write_text(json.dumps(given))
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"eos_token_id": 5}))
    tokenizer = Tokenizer.from_path(source)
    ends = [5, *sorted({tokenizer.eos_token_id, tokenizer.token_to_id("<|im_end|>")} - {None})]
    assert len(ends) > 1
    again = tmp_path / "second"
    settings = ("trainer.total_steps=1", "trainer.save_freq=1", "optimizer.lr=1e-5")
    run(task, again, *settings, "algorithm.beta=0.01", load_sft_checkpoint_infer=source)
    exported = tmp_path / "exported"
    assert jobs.call(["export", "--checkpoint", again / "ckpt" / "latest", "--output", exported]) == 0
    for folder in (again / "ckpt" / "hf", again / "ckpt" / "step_000001" / "hf", exported):
        files = [json.loads((folder / name).read_text()) for name in ("config.json", "generation_config.json")]
        assert [content["eos_token_id"] for content in files] == [ends, ends]
        assert files[1].items() >= (given | {"eos_token_id": ends}).items()
        card = (folder / "README.md").read_text()
        assert card.startswith("---\nlibrary_name: transformers\n")
        assert f"| first weights | the local folder {tmp_path.name}/Tiny-Instruct |" in card
        assert "grpo advantages, clip loss, KL (k3) with weight 0.01; 1 steps of 4 prompts with 4 answers each" in card
        assert "train.mindrecord: 64 prompts (arithmetic)" in card
        assert "| optimizer.lr | 1e-05 |" in card
        assert "| seed | 0 |" in card
    card = (again / "ckpt" / "hf" / "README.md").read_text()
    assert "| critic/rewards/mean | " in card
    reward = read_metrics(again / "metrics.jsonl")[0]["critic/rewards/mean"]
    assert f"| step | |\n| --- | --- |\n| 1 | {reward:.4g} |\n" in card
    assert not (again / "ckpt" / "hf" / "curves.png").exists(), "one step is no curve"
    assert "Weights after step 1." in (exported / "README.md").read_text()
    card = (exported / "README.md").read_text()
    (exported / "README.md").write_text(card.replace("---\n", '---\nbase_model: "Org/Tiny"\n', 1))
    third = run(task, tmp_path / "third", "trainer.total_steps=1", load_sft_checkpoint_infer=exported)
    card = (third.folder / "ckpt" / "hf" / "README.md").read_text()
    assert card.startswith('---\nbase_model: "Org/Tiny"\nlibrary_name: transformers\n'), "lineage"
