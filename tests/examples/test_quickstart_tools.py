"""The second quick start's commands, in small: a tiny model imitates demonstrations, trains and is evaluated."""

import json
import re

import jobs
import numpy as np
import pytest

from mindrlhf.data.tasks import calculator
from mindrlhf.files.json import read_json_lines, write_json_lines
from mindrlhf.files.naming import step_files
from mindrlhf.report.answers import AnswerReader
from mindrlhf.report.html import report_data
from mindrlhf.report.run import read_run
from mindrlhf.rewards.registry import resolve

SETTINGS = (
    "rollout.tools=[calculator]",
    "rollout.max_turns=3",
    "rollout.max_new_tokens=72",
    "reward.functions=[{name: gsm8k}]",
    "trainer.total_steps=2",
    "trainer.save_rollouts=True",
    "algorithm.beta=0",
)


@pytest.fixture(scope="module")
def tuned(tmp_path_factory):
    """A model that has learnt the form of calls, in seconds: numbers are beyond it."""
    folder = tmp_path_factory.mktemp("calculator")
    sizes = ("--train_size", 300, "--test_size", 16, "--careless_share", 0.1, "--tokenizer_vocab_size", 400)
    assert jobs.call(["synthesize", "--task", "calculator", "--output_dir", folder, *sizes]) == 0
    for name in ("train", "test"):
        path = folder / f"{name}.jsonl"
        write_json_lines(path, filter(is_hard, read_json_lines(path)))
        files = ("--file_path", path, "--output_path", folder / f"{name}.mindrecord")
        kind = ("--tokenizer_path", folder, "--dataset_type", "calculator", "--system_prompt", "")
        assert jobs.call(["data", *files, *kind]) == 0
    jobs.write_yamls(folder, 400, layers=1)
    task = jobs.Task(folder)
    conversations = {"mind_dataset_dir": folder / "demonstrations.jsonl"}
    settings = ("trainer.total_steps=200", "train.length_bucket=96", "optimizer.warmup_steps=5")
    assert jobs.call(task.sft(folder / "sft", *settings, **conversations)) == 0
    return task, folder / "sft" / "ckpt" / "hf"


def is_hard(row) -> bool:
    """Test for a problem that demonstrations call the calculator for."""
    return max(map(int, re.findall(r"\d+", row["question"]))) > calculator.EASY


@pytest.mark.slow
def test_training_and_evaluation_with_the_calculator(tuned, tmp_path, capsys, monkeypatch):
    task, model = tuned
    monkeypatch.setenv("COLUMNS", "100")
    arguments = task.train(tmp_path, *SETTINGS, load_sft_checkpoint_infer=model)
    assert jobs.call(arguments) == 0
    run = jobs.Run(tmp_path)
    assert (run.column("tools/call_frequency") > 0.3).all()
    assert (run.column("conversation/turns") > 1).all()
    assert (run.column("conversation/tool_tokens") > 1).all()
    assert (run.column("rollout_corr/log_prob_diff/max") < 1e-4).all()
    assert printed_calls(capsys.readouterr().out) == [f"{calls:.2f}" for calls in run.column("tools/call_frequency")]
    answered = [one for _, step in run.rollouts for e in step for one in e.group.rollouts if not one.sampled.all()]
    assert all((np.diff(one.sampled.astype(int)) != 0).any() for one in answered)
    titles = [chart["title"] for chart in report_data([read_run(tmp_path, "a", AnswerReader())])["learning"]]
    assert {"Calls of tools", "Failed calls of tools", "Turns", "Tokens by role"} <= set(titles)
    figures_of_tokens(tmp_path)


def printed_calls(printed: str) -> list[str]:
    """Read the `calls` column of both steps in the console."""
    rows = [line.split() for line in printed.splitlines()]
    (titles,) = [row for row in rows if row[:1] == ["step"]]
    return [row[titles.index("calls")] for row in rows if row and row[0] in ("1/2", "2/2")]


def figures_of_tokens(folder) -> None:
    """Those of one prompt's answers in each step, with one update of the policy that drew them."""
    for path in step_files(folder / "rollouts").values():
        rows = read_json_lines(path)
        described = [row for row in rows if "tokens" in row]
        assert len({row["prompt_id"] for row in described}) == 1
        assert len(described) == sum(row["prompt_id"] == described[0]["prompt_id"] for row in rows)
        for row in described:
            tokens = {name: np.array(values) for name, values in row["tokens"].items()}
            sampled = tokens["sampled"] > 0
            assert "".join(row["tokens"]["text"]) == row["completion"]
            assert sampled.sum() == row["response_length"]
            assert (tokens["ratio"][sampled] == 1).all()
            assert (tokens["entropy"][sampled] > 0).all()
            assert not tokens["clipped"].any()
            np.testing.assert_allclose(tokens["advantage"][sampled], row["advantage"], rtol=1e-6)


def test_a_right_answer_is_worth_more_without_a_call(root):
    function = resolve(f"{root}/examples/qwen_grpo_tutorial/quickstart_tools_reward.py:thrifty")
    call = "<tool_call>\n{}\n</tool_call>"
    said = {"6 * 7 = 42 #### 42": 1, f"{call}#### 42": 0.8, f"{call}{call}#### 42": 0.6, f"{call}#### 41": 0, call: 0}
    rewards = {text: function("What is 6 * 7?", text, {"ground_truth": "42"}) for text in said}
    assert rewards == pytest.approx(said)


def count_turns(answer: str) -> int:
    """As verl does, where the policy has up to two: the prompt, these, and a tool's answer between them."""
    return 4 if answer.partition("</tool_call>")[2] else 2


@pytest.mark.slow
def test_the_calculator_can_be_switched_off(tuned, tmp_path, capsys):
    task, model = tuned
    flags = ("--model", model, "--data", task.folder / "test.mindrecord", "--max_new_tokens", "160", "--limit", "8")
    found = {}
    several = ("--max_turns", "2", "--tools")
    for name, more in {"with": (*several, "calculator"), "none": (*several, "none"), "one turn": ()}.items():
        output = tmp_path / f"{name}.jsonl"
        capsys.readouterr()
        assert jobs.call(["eval", *flags, *more, "--output", output]) == 0
        rows = read_json_lines(output)
        found[name] = json.loads(capsys.readouterr().out.splitlines()[-1]), [row["answer"] for row in rows]
        turns = {row["answer"]: row["num_turns"] for row in rows}
        assert turns == {text: count_turns(text) if more else None for text in turns}
        if more:
            assert found[name][0]["num_turns/mean"] == pytest.approx(np.mean([row["num_turns"] for row in rows]))
    printed, answers = found["with"]
    calls = np.mean([answer.count("</tool_call>") for answer in answers])
    assert printed["problems"] == 8
    assert calls > 0.5
    assert printed["tools/call_frequency"] == pytest.approx(calls)
    assert 1 < printed["conversation/turns"] <= 2
    assert printed["tools/failure_frequency"] < 1
    assert any("####" in answer.rpartition("</tool_call>")[2] for answer in answers)
    printed, answers = found["none"]
    assert printed["tools/call_frequency"] == pytest.approx(np.mean([text.count("</tool_call>") for text in answers]))
    assert printed["tools/failure_frequency"] == 1
    assert 1 < printed["conversation/turns"] <= 2
    assert any(answer.partition("</tool_call>")[2] for answer in answers), "the model goes on after the error"
    printed, answers = found["one turn"]
    assert not any(name.startswith(("tools/", "conversation/", "num_turns/")) for name in printed)
    assert all("####" not in answer.rpartition("</tool_call>")[2] for answer in answers if "</tool_call>" in answer)
