"""`mindrlhf sft` and `mindrlhf eval`: what they do, and what they refuse."""

import contextlib
import json

import jobs
import numpy as np
import pytest
import reference_model
from safetensors.numpy import load_file
from small_model import log_softmax, read_model

from mindrlhf.data.demonstrations import read_demonstrations
from mindrlhf.data.mindrecord import read_prompts
from mindrlhf.data.tokenizer import Tokenizer
from mindrlhf.evaluation.pass_at_k import read_answers


def evaluation(task, model, *arguments) -> list:
    flags = ("--model", model, "--data", task.folder / "test.mindrecord", "--max_new_tokens", 12)
    return ["eval", *flags, *arguments]


@pytest.fixture(scope="module")
def tuned(task, tmp_path_factory) -> jobs.Run:
    """Fine-tuned on one short problem again and again, so that the answer is learnt in seconds."""
    folder = tmp_path_factory.mktemp("tuned")
    problem = {"question": "How many legs do three cats have?", "answer": "3*4=12\n#### 12"}
    for name, count in (("one", 8), ("test", 3)):
        (folder / f"{name}.jsonl").write_text((json.dumps(problem) + "\n") * count)
        paths = ("--file_path", folder / f"{name}.jsonl", "--output_path", folder / f"{name}.mindrecord")
        assert jobs.call(["data", "--tokenizer_path", task.folder, "--template", "plain", *paths]) == 0
    rates = ("optimizer.lr=1e-2", "optimizer.lr_decay=linear", "optimizer.warmup_steps=5")
    settings = ("trainer.total_steps=90", *rates, jobs.ONE_LAYER[0])
    with contextlib.redirect_stdout((folder / "console").open("w")):
        flags = {"mind_dataset_dir": folder / "one.mindrecord", "enable_compile_cache": None}
        assert jobs.call(task.sft(folder, *settings, **flags)) == 0
    return jobs.Run(folder)


def test_sft_learns(tuned):
    losses = tuned.column("train/loss")
    assert len(losses) == 90
    assert np.isfinite(losses).all()
    assert losses[0] == pytest.approx(np.log(300), rel=0.05)  # random weights: every token is as likely
    assert losses[-1] < 0.1
    assert (tuned.column("actor/skipped_updates") == 0).all()
    assert tuned.column("training/epoch")[-1] == 90
    assert list((tuned.folder / "tensorboard").iterdir())
    lines = (tuned.folder / "console").read_text().splitlines()
    header, first, *_, last = [line for line in lines if not line.startswith("compiling graphs: ")]
    assert header.split()[:3] == ["step", "loss", "trend"]
    assert first.split()[:3] == ["1/90", f"{losses[0]:.2f}", "-"]
    assert last == f"the fine-tuned model is in {tuned.folder}/ckpt/hf"


def test_sft_writes_a_model_with_its_tokenizer(task, tuned):
    names = {path.name for path in (tuned.folder / "ckpt" / "hf").iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "vocab.json", "merges.txt"} <= names
    config = json.loads((tuned.folder / "ckpt/hf/config.json").read_text())
    assert (config["model_type"], config["hidden_size"], config["num_hidden_layers"]) == ("qwen2", 32, 1)
    assert tuned.weights["model.embed_tokens.weight"].shape == (300, 32)


def test_sft_on_conversations_learns_the_assistant_s_tokens_only(task, model, tmp_path):
    """The first step's loss against float64 NumPy: the mean over all tokens that the assistant writes."""
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}
    short = [{"role": "user", "content": "2?"}, {"role": "assistant", "content": "2"}]
    long = [{"role": "user", "content": "1+2?"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    long += [{"role": "tool", "content": "3"}, {"role": "assistant", "content": "It is 3."}]
    data = tmp_path / "conversations.jsonl"
    data.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in (short, long)))
    settings = ("data.pairs_per_step=2", "trainer.total_steps=1", f"data.val_dataset={data}", "trainer.test_freq=1")
    flags = {"mind_dataset_dir": data, "load_sft_checkpoint_train": model}
    assert jobs.call(task.sft(tmp_path, *settings, **flags)) == 0
    losses = assistant_losses(task, model, data)
    before, after = jobs.Run(tmp_path).metrics
    assert before["val/loss"] == pytest.approx(losses.mean(), rel=1e-5)
    assert after["train/loss"] == pytest.approx(losses.mean(), rel=1e-5)
    assert after["val/loss"] == pytest.approx(assistant_losses(task, tmp_path / "ckpt" / "hf", data).mean(), rel=1e-5)


def assistant_losses(task, model, data) -> np.ndarray:
    """-log p of every token that the assistant writes, by the reference in float64."""
    config, tensors = read_model(model)
    losses = []
    for turns in read_demonstrations(data, Tokenizer.from_path(task.folder)):
        ids = np.concatenate([turns.prompt_ids, turns.response_ids])
        found = log_softmax(reference_model.logits(config, tensors, ids)[:-1])[np.arange(len(ids) - 1), ids[1:]]
        losses.append(-found[-len(turns.response_ids) :][turns.sampled])
        assert turns.sampled.all() == (len(losses) == 1)
    return np.concatenate(losses)


@pytest.fixture(scope="module")
def stopped(task, tmp_path_factory) -> jobs.Run:
    """A run that learns three rows by heart, forgets about others, and is stopped for that."""
    folder = tmp_path_factory.mktemp("stopped")
    rows = [{"messages": [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": n}]} for n in "123"]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = ("trainer.total_steps=40", "trainer.test_freq=2", "trainer.early_stop_patience=2", "validation.limit=4")
    held_out = (f"data.val_dataset={task.folder}/test.mindrecord", f"data.val_problems={task.folder}/test.mindrecord")
    best = (
        "trainer.export_best=True",
        "data.pairs_per_step=3",
        "validation.max_new_tokens=8",
        jobs.ONE_LAYER[0],
        "seed=1",
    )
    with contextlib.redirect_stdout((folder / "console").open("w")):
        argv = task.sft(folder, *settings, *held_out, *best, mind_dataset_dir=folder / "rows.jsonl")
        assert jobs.call(argv) == 0
    return jobs.Run(folder)


def test_sft_stops_early_and_exports_its_best_step(stopped, tmp_path):
    losses = {row["step"]: row["val/loss"] for row in stopped.metrics if "val/loss" in row}
    best = min(losses.keys() - {0}, key=losses.get)
    last = max(losses)
    assert last == best + 4 < 40, "two measurements later"
    said = f"early stop after step {last} of 40: 2 measurements without a better one; val/loss was best in step {best}"
    assert said in (stopped.folder / "console").read_text()
    exported = tmp_path / "best"
    assert jobs.call(["export", "--checkpoint", stopped.folder / "ckpt" / "best", "--output", exported]) == 0
    expected = load_file(exported / "model.safetensors")
    assert expected.keys() == stopped.weights.keys()
    for name, weights in stopped.weights.items():
        np.testing.assert_array_equal(weights, expected[name], err_msg=name)
    card = (stopped.folder / "ckpt" / "hf" / "README.md").read_text()
    assert f"{losses[best]:.6g}" in card


def test_sft_measures_accuracy(stopped):
    """On the first four held-out problems, every time that the loss is measured."""
    rows = [row for row in stopped.metrics if "val/loss" in row]
    assert rows[0]["step"] == 0
    for row in rows:
        assert row["val-core/arithmetic/acc/mean@1"] == 0.0
        answers = read_answers(stopped.folder / "validation" / f"step_{row['step']:06d}.jsonl")
        assert [answer.id for answer in answers] == [0, 1, 2, 3]


def test_eval_of_what_was_learnt(task, tuned, tmp_path, capsys):
    answers = tmp_path / "new" / "answers.jsonl"
    flags = ("--data", tuned.folder / "test.mindrecord", "--output", answers, "--limit", 2, "--slots", 1)
    capsys.readouterr()
    assert jobs.call(["eval", "--model", tuned.folder / "ckpt" / "hf", "--max_new_tokens", 32, *flags]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result == {"accuracy": 1.0, "problems": 2, "mean_length": result["mean_length"], "truncated": 0.0}
    rows = [json.loads(line) for line in answers.read_text().splitlines()]
    assert [row["id"] for row in rows] == [0, 1]
    for row in rows:
        assert row["question"] == "How many legs do three cats have?"
        assert (row["answer"], row["ground_truth"], row["score"]) == ("3*4=12\n#### 12", "12", 1.0)
        assert row["length"] == result["mean_length"]
        assert row["truncated"] is False
        assert (row["source"], row["sample"], row["vote"]) == ("gsm8k", 0, "12")


def test_eval_compares_two_models(tuned, model, tmp_path, capsys):
    """Several answers to each problem by both."""
    answers, data = tmp_path / "answers.jsonl", tuned.folder / "test.mindrecord"
    drawn = ("--num_generations", 4, "--temperature", 0.5, "--max_new_tokens", 16, "--limit", 3)
    models = ("--model", tuned.folder / "ckpt" / "hf", "--compare", model)
    assert jobs.call(["eval", "--data", data, *drawn, *models, "--output", answers]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    random = result["compared_with"]
    assert random["model"] == str(model)
    assert random["pass@4"] == random["maj@2"] == random["accuracy"] == 0.0
    assert (result["accuracy"], result["pass@4"], result["maj@4"], result["problems"]) == (1.0, 1.0, 1.0, 3)
    comparison = result["comparison"]
    assert (comparison["difference"], comparison["wins"], comparison["losses"]) == (1.0, 3, 0)
    assert comparison["p"] == 0.25  # three of three, two-sided
    written = read_answers(answers)
    assert [(one.id, one.sample, one.solves) for one in written] == [(i, j, True) for i in range(3) for j in range(4)]


def test_eval_of_random_weights(task, model, capsys):
    """Nothing solved; a reward function of one's own decides what is right."""
    capsys.readouterr()
    assert jobs.call(evaluation(task, model, "--reward", f"{task.folder}/reward.py:variety")) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["problems"] == len(read_prompts(task.folder / "test.mindrecord"))
    assert result["accuracy"] < 1.0
    assert 0 < result["truncated"] <= 1.0
    assert result["mean_length"] <= 12


@pytest.mark.parametrize(
    ("flags", "texts"),
    [
        (("--model", "none"), ("none",)),
        (("--data", "none.mindrecord"), ("none.mindrecord: no such MindRecord file",)),
        (("--limit", 0), ("--limit 0: should be 1 or more",)),
        (("--slots", 0), ("--slots 0: should be 1 or more",)),
        (("--num_generations", 0), ("--num_generations 0: should be 1 or more",)),
        (("--num_generations", 2), ("--num_generations 2", "set temperature above 0")),
        (("--temperature", -1), ("temperature", "-1")),
        (("--temperature", "nan"), ("temperature", "nan")),
        (("--top_p", 0), ("top_p", "above 0")),
        (("--compare", "none"), ("none: no such checkpoint",)),
        (("--compare", "none.jsonl"), ("cannot read none.jsonl",)),
        (("--max_new_tokens", 0), ("max_new_tokens is 0", "at least 1")),
        (("--seed", -1), ("--seed -1: should be 0 or more",)),
        (("--max_new_tokens", 2048), ("max_new_tokens 2048", "2048 positions", "or fewer")),
        (("--reward", "gsm"), ("gsm", "gsm8k")),
        (("--vocab_path", "vocab.json"), ("--vocab_path and --merges_file_path belong together",)),
    ],
)
def test_eval_refuses(task, model, output, refused, flags, texts):
    refused(evaluation(task, model, "--output", output / "answers.jsonl", *flags), *texts)


def test_eval_refuses_an_output_it_cannot_write(task, model, output, refused):
    below = output / "metrics.jsonl" / "answers.jsonl"
    refused(evaluation(task, model, "--output", below), "cannot create the folder", output / "metrics.jsonl")


@pytest.mark.parametrize(
    ("settings", "flags", "texts"),
    [
        ((), {"mind_dataset_dir": "none.mindrecord"}, ("none.mindrecord: no such MindRecord file",)),
        ((), {"load_sft_checkpoint_train": "none"}, ("none: no such checkpoint",)),
        ((), {"tokenizer_path": None}, ("no tokenizer is given",)),
        ((), {"sft_path_train": "none.yaml"}, ("none.yaml: there is no such file",)),
        ((), {"sft_config": "none.yaml"}, ("none.yaml: there is no such file",)),
        (("data.pairs_per_steps=8",), {}, ("unknown key data.pairs_per_steps", "pairs_per_step")),
        (("rollout.num_generations=8",), {}, ("unknown key rollout",)),
        (("train_yaml.model.model_config.vocab_size=290",), {}, ("300 tokens", "vocab_size is 290")),
        (("train_yaml.parallel_config.data_parallel=2",), {}, ("the workers started are 1", "--worker_num=2")),
        (("optimizer.lr=high",), {}, ("optimizer.lr", "high")),
        ((), {"mind_dataset_dir": "none.jsonl"}, ("none.jsonl",)),
        (("data.val_dataset=none.jsonl", "trainer.test_freq=1"), {}, ("none.jsonl",)),
        (("data.val_share=0.001", "trainer.test_freq=1"), {}, ("data.val_share is 0.001", "0 of 64 rows")),
        (("data.val_share=0.5", "data.val_dataset=a.jsonl"), {}, ("data.val_share is 0.5", "give one of them")),
        (("trainer.test_freq=1",), {}, ("trainer.test_freq needs held-out rows", "data.val_share")),
        (("trainer.early_stop_patience=2", "data.val_share=0.1"), {}, ("val/loss", "set test_freq too")),
        (("trainer.export_best=True",), {}, ("val/loss, which is measured every trainer.test_freq steps; set test",)),
        (
            ("trainer.export_best=True", "trainer.test_freq=1", "data.val_problems=none.mindrecord"),
            {},
            ("val/loss is measured on held-out rows",),
        ),
    ],
)
def test_sft_refuses(task, output, refused, settings, flags, texts):
    refused(task.sft(output, *settings, **flags), *texts)


def test_sft_refuses_pairs_that_do_not_divide(task, output, refused, monkeypatch):
    monkeypatch.setenv("MS_ROLE", "MS_WORKER")
    monkeypatch.setenv("MS_WORKER_NUM", "2")
    argv = task.sft(output, "train_yaml.parallel_config.data_parallel=2", "data.pairs_per_step=7")
    refused(argv, "data.pairs_per_step is 7", "data_parallel 2", "6 or 8")


def test_sft_refuses_data_without_answers(task, output, refused, tmp_path):
    (tmp_path / "problems.jsonl").write_text('{"nums": [1, 2, 3], "target": 6}\n')
    path = tmp_path / "problems.mindrecord"
    files = ("--file_path", tmp_path / "problems.jsonl", "--output_path", path, "--dataset_type", "countdown")
    assert jobs.call(["data", "--tokenizer_path", task.folder, *files]) == 0
    refused(task.sft(output, mind_dataset_dir=path), f"{path}: no row has a worked answer", "SFT trains on answers")


def test_sft_refuses_an_output_it_cannot_write(task, output, refused):
    refused(task.sft(output, save_ckpt_dir=output / "metrics.jsonl" / "ckpt"), "cannot create the folder")
    refused(task.sft(output, output_dir=output / "metrics.jsonl"), "cannot create the folder")
    (output / "ckpt" / "hf" / "thesis.tex").write_text("somebody's")
    refused(task.sft(output), "thesis.tex: is no part of a model")
