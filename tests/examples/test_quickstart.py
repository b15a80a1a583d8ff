"""The quick starts: their settings pass the checks of a run, and all their steps work together (slow)."""

import json
import os
import re
import statistics
import subprocess

import pytest

from mindrlhf.configs.loading import load_grpo_config, load_sft_config
from mindrlhf.configs.model_yaml import load_model_yaml
from mindrlhf.configs.validate import check_grpo, check_lengths, check_sft
from mindrlhf.data.mindrecord import read_prompts
from mindrlhf.records.formats import read_record

PROMPT_TOKENS = 56  # no question of the task is longer


@pytest.fixture
def example(root):
    return root / "examples" / "qwen_grpo_tutorial"


@pytest.mark.parametrize("name", ["quickstart", "quickstart_tools"])
def test_settings_pass_the_checks_of_a_run(root, example, name):
    models = root / "model_configs" / "qwen_grpo"
    train, infer = (load_model_yaml(models / f"{role}_qwen2_tiny.yaml") for role in ("finetune", "predict"))
    model = train.architecture()
    grpo = load_grpo_config(example / f"{name}_grpo.yaml", (), infer.sampling_defaults())
    sft = load_sft_config(example / f"{name}_sft.yaml")
    check_grpo(grpo, train, infer, model, infer.architecture(), workers=1)
    check_sft(sft, train, model, workers=1)
    check_lengths(grpo, train, model, PROMPT_TOKENS)
    assert grpo.rollout.temperature == 1.0, "ratios are of the distribution that was sampled"
    script = (root / "scripts" / f"{name}.sh").read_text()
    allowed = re.findall(r"--max_new_tokens (\d+)", script)
    assert set(allowed) == {str(grpo.rollout.max_new_tokens)}, "evaluation allows what training allows"
    if grpo.rollout.converses:
        assert f"--max_turns {grpo.rollout.max_turns})" in script
        assert f"--tools {' '.join(grpo.rollout.tools)}\n" in script


@pytest.mark.parametrize("name", ["quickstart.sh", "quickstart_tools.sh", "quickstart_vision.sh", "quickstart_real.sh"])
@pytest.mark.parametrize(
    "arguments",
    [
        *(["--steps", "0"], ["--steps", "3x"], ["--seed", "-1"], ["--out"], ["now"], ["--minutes", "0"]),
        ["--model", "no_such_model"],
    ],
)
def test_a_wrong_option_is_refused_before_anything_is_done(root, tmp_path, name, arguments):
    done = run(root, tmp_path, *arguments, name=name)
    assert done.returncode == 2
    options = r"--seed N, --out DIR(, --minutes N)?(, --model NAME)? or --steps N"
    assert re.fullmatch(rf"{re.escape(name)}: .*give {options}\n", done.stderr)
    assert done.stdout == ""


@pytest.fixture
def _installed(root):
    if not (root / ".venv" / "installed-base").exists() and not (root / ".venv" / "installed-dev").exists():
        pytest.skip("no .venv: scripts/setup.sh has not been run, and a test does not fetch 800 MB")


@pytest.mark.slow
@pytest.mark.msrun
@pytest.mark.timeout(1200)
@pytest.mark.usefixtures("_installed")
def test_every_step_of_it_works(root, tmp_path):
    done = run(root, tmp_path, "--out", "here", "--steps", "2", "--seed", "1")
    assert done.returncode == 0, done.stdout + done.stderr
    out = tmp_path / "here"
    before, after = re.search(r"greedy: ([\d.]+) before GRPO, ([\d.]+) after", done.stdout).groups()
    for name, accuracy in (("before", before), ("after", after)):
        answers = [json.loads(line) for line in (out / f"eval_{name}.jsonl").read_text().splitlines()]
        assert len(answers) >= 200
        assert sum(answer["score"] == 1 for answer in answers) / len(answers) == pytest.approx(
            float(accuracy), abs=1e-4
        )
    demonstrations, train, test = (
        {prompt.fields["question"] for prompt in read_prompts(out / "data" / f"{name}.mindrecord")}
        for name in ("demonstrations", "train", "test")
    )
    assert not test & (demonstrations | train)
    assert " 2/2 " in done.stdout, "the worker's lines come to the console"
    assert len((out / "grpo" / "metrics.jsonl").read_text().splitlines()) == 2
    assert len(read_record(out / "grpo" / "rollouts.mindrecord")) == 2
    assert list((out / "grpo" / "tensorboard").iterdir())
    assert (out / "grpo" / "hf" / "config.json").exists()
    assert (out / "reward_curve.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
@pytest.mark.msrun
@pytest.mark.timeout(1800)
@pytest.mark.usefixtures("_installed")
def test_every_step_with_the_real_model_works(root, tmp_path):
    """The model comes from a package registry."""
    done = run(root, tmp_path, "--out", "here", "--steps", "1", name="quickstart_real.sh")
    assert done.returncode == 0, done.stdout + done.stderr
    out = tmp_path / "here"
    for name in ("before", "after"):
        assert len((out / f"eval_{name}.jsonl").read_text().splitlines()) == 400
    shown = (out / "before_and_after.txt").read_text()
    assert re.findall(r"^  (before|after) ", shown, re.MULTILINE) == ["before", "after"] * 5
    assert len(re.findall(r"greedy, (?:before|after): 0\.\d{3} \(0\.\d{3} to 0\.\d{3}\)", shown)) == 2
    assert (out / "grpo" / "hf" / "config.json").exists()
    assert (out / "grpo" / "report.html").exists()
    assert (out / "reward_curve.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
@pytest.mark.msrun
@pytest.mark.timeout(1800)
@pytest.mark.usefixtures("_installed")
def test_a_model_learns_to_call_the_calculator(root, tmp_path):
    done = run(root, tmp_path, "--out", "here", name="quickstart_tools.sh")
    assert done.returncode == 0, done.stdout + done.stderr
    out, found = tmp_path / "here", r"greedy: ([\d.]+) before GRPO, ([\d.]+) after, ([\d.]+) after and without"
    before, after, without = map(float, re.search(found, done.stdout).groups())
    drawn = float(re.search(r"of drawn answers: ([\d.]+) before GRPO", done.stdout)[1])
    assert 0 < before < 0.35
    assert 0 < drawn < 0.35
    assert after >= 0.9
    assert 0.1 < without < 0.5, "the calculator is used, and some problems need none"
    rows = [json.loads(line) for line in (out / "grpo" / "metrics.jsonl").read_text().splitlines()]
    first, last = rows[:10], rows[-10:]
    assert mean(first, "tools/call_frequency") < 0.55
    assert mean(last, "tools/call_frequency") == pytest.approx(0.8, abs=0.1), "four problems of five are hard"
    assert mean(last, "tools/failure_frequency") < 0.05 < 0.1 < mean(first, "tools/failure_frequency")
    assert rows[0]["critic/rewards/mean"] < 0.5
    assert "Calls of tools" in (out / "grpo" / "report.html").read_text()
    assert (out / "reward_curve.png").read_bytes().startswith(b"\x89PNG")


def mean(rows, name: str) -> float:
    return statistics.fmean(row[name] for row in rows)


def run(root, folder, *arguments: str, name: str = "quickstart.sh") -> subprocess.CompletedProcess:
    """A script, started in `folder`."""
    command = ["bash", str(root / "scripts" / name), *arguments]
    return subprocess.run(command, cwd=folder, env=os.environ, capture_output=True, text=True, timeout=1700)
