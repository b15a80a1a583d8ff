"""`mindrlhf sft` and `mindrlhf eval`: what they do, and what they refuse."""

import contextlib
import json

import jobs
import numpy as np
import pytest
import reference_model
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
    settings = ("trainer.total_steps=60", "optimizer.lr=1e-2", "optimizer.lr_decay=linear", "optimizer.warmup_steps=5")
    with contextlib.redirect_stdout((folder / "console").open("w")):
        assert jobs.call(task.sft(folder, *settings, mind_dataset_dir=folder / "one.mindrecord")) == 0
    return jobs.Run(folder)


def test_sft_learns(tuned):
    losses = tuned.column("train/loss")
    assert len(losses) == 60
    assert np.isfinite(losses).all()
    assert losses[0] == pytest.approx(np.log(300), rel=0.05)  # random weights: every token is as likely
    assert losses[-1] < 0.1
    assert (tuned.column("actor/skipped_updates") == 0).all()
    assert tuned.column("training/epoch")[-1] == 60
    assert list((tuned.folder / "tensorboard").iterdir())
    first, *_, last = (tuned.folder / "console").read_text().splitlines()
    assert first.startswith("step 1/60 | loss 5.")
    assert last == f"the fine-tuned model is in {tuned.folder}/ckpt/hf"


def test_sft_writes_a_model_with_its_tokenizer(task, tuned):
    names = {path.name for path in (tuned.folder / "ckpt" / "hf").iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "vocab.json", "merges.txt"} <= names
    config = json.loads((tuned.folder / "ckpt/hf/config.json").read_text())
    assert (config["model_type"], config["hidden_size"], config["num_hidden_layers"]) == ("qwen2", 32, 2)
    assert tuned.weights["model.embed_tokens.weight"].shape == (300, 32)


def test_sft_on_conversations_learns_the_assistant_s_tokens_only(task, model, tmp_path):
    """The first step's loss against float64 NumPy: the mean over all tokens that the assistant writes."""
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}
    short = [{"role": "user", "content": "2?"}, {"role": "assistant", "content": "2"}]
    long = [{"role": "user", "content": "1+2?"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    long += [{"role": "tool", "content": "3"}, {"role": "assistant", "content": "It is 3."}]
    data = tmp_path / "conversations.jsonl"
    data.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in (short, long)))
    settings = ("data.pairs_per_step=2", "trainer.total_steps=1")
    flags = {"mind_dataset_dir": data, "load_sft_checkpoint_train": model}
    assert jobs.call(task.sft(tmp_path, *settings, **flags)) == 0
    config, tensors = read_model(model)
    losses = []
    for turns in read_demonstrations(data, Tokenizer.from_path(task.folder)):
        ids = np.concatenate([turns.prompt_ids, turns.response_ids])
        found = log_softmax(reference_model.logits(config, tensors, ids)[:-1])[np.arange(len(ids) - 1), ids[1:]]
        losses.append(-found[-len(turns.response_ids) :][turns.sampled])
        assert turns.sampled.all() == (len(losses) == 1)
    (loss,) = jobs.Run(tmp_path).column("train/loss")
    assert loss == pytest.approx(np.concatenate(losses).mean(), rel=1e-5)


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
    drawn = ("--num_generations", 4, "--temperature", 0.5, "--top_p", 0.9, "--max_new_tokens", 16, "--limit", 3)
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
