"""The second quick start's commands, in small: a tiny model imitates demonstrations, trains and is evaluated."""

import json

import jobs
import numpy as np
import pytest

from mindrlhf.metrics.report.html import report_data
from mindrlhf.metrics.report.run import read_run

SETTINGS = (
    "rollout.tools=[calculator]",
    "rollout.max_turns=3",
    "rollout.max_new_tokens=72",
    "reward.functions=[{name: gsm8k}]",
    "trainer.total_steps=2",
    "trainer.save_rollouts=True",
)


@pytest.fixture(scope="module")
def tuned(tmp_path_factory):
    """A model that has learnt the form of calls, in seconds: numbers are beyond it."""
    folder = tmp_path_factory.mktemp("calculator")
    sizes = ("--train_size", 300, "--test_size", 16, "--careless_share", 0.1, "--tokenizer_vocab_size", 400)
    kind = ("--task", "calculator", "--operations", "*")
    assert jobs.call(["synthesize", *kind, "--output_dir", folder, *sizes]) == 0
    for name in ("train", "test"):
        files = ("--file_path", folder / f"{name}.jsonl", "--output_path", folder / f"{name}.mindrecord")
        kind = ("--tokenizer_path", folder, "--dataset_type", "calculator", "--system_prompt", "")
        assert jobs.call(["data", *files, *kind]) == 0
    jobs.write_yamls(folder, 400)
    task = jobs.Task(folder)
    conversations = {"mind_dataset_dir": folder / "demonstrations.jsonl"}
    settings = ("trainer.total_steps=100", "train.length_bucket=96", "optimizer.warmup_steps=5")
    assert jobs.call(task.sft(folder / "sft", *settings, **conversations)) == 0
    return task, folder / "sft" / "ckpt" / "hf"


def test_training_and_evaluation_with_the_calculator(tuned, tmp_path, capsys):
    task, model = tuned
    arguments = task.train(tmp_path, *SETTINGS, load_sft_checkpoint_infer=model)
    assert jobs.call(arguments) == 0
    run = jobs.Run(tmp_path)
    assert (run.column("tools/call_frequency") > 0.3).all()
    assert (run.column("conversation/turns") > 1).all()
    assert (run.column("conversation/tool_tokens") > 1).all()
    assert (run.column("rollout_corr/log_prob_diff/max") < 1e-4).all()
    assert " | calls " in capsys.readouterr().out
    answered = [one for _, step in run.rollouts for e in step for one in e.group.rollouts if not one.sampled.all()]
    assert all((np.diff(one.sampled.astype(int)) != 0).any() for one in answered)
    titles = [chart["title"] for chart in report_data([read_run(tmp_path, "a", 8, 2)])["learning"]]
    assert {"Calls of tools", "Failed calls of tools", "Turns", "Tokens by role"} <= set(titles)


def test_the_calculator_can_be_switched_off(tuned, tmp_path, capsys):
    task, model = tuned
    flags = ("--model", model, "--data", task.folder / "test.mindrecord", "--max_new_tokens", "72", "--limit", "8")
    found = {}
    for name, more in {"with": ("--tools", "calculator", "--max_turns", "2"), "without": ()}.items():
        output = tmp_path / f"{name}.jsonl"
        capsys.readouterr()
        assert jobs.call(["eval", *flags, *more, "--output", output]) == 0
        answers = [json.loads(line)["answer"] for line in output.read_text().splitlines()]
        found[name] = json.loads(capsys.readouterr().out), answers
    printed, answers = found["with"]
    calls = np.mean([answer.count("</tool_call>") for answer in answers])
    assert printed["problems"] == 8
    assert calls > 0.5
    assert printed["tools/call_frequency"] == pytest.approx(calls)
    assert 1 < printed["conversation/turns"] <= 2
    assert printed["tools/failure_frequency"] < 1
    assert any("####" in answer.rpartition("</tool_call>")[2] for answer in answers)
    printed, answers = found["without"]
    assert not any(name.startswith(("tools/", "conversation/")) for name in printed)
    assert all("####" not in answer.rpartition("</tool_call>")[2] for answer in answers if "</tool_call>" in answer)
