"""The quick start: its settings pass the checks of a run, and all its steps work together (slow)."""

import json
import os
import re
import subprocess

import pytest

from mindrlhf.configs.loading import load_grpo_config, load_sft_config
from mindrlhf.configs.model_yaml import load_model_yaml
from mindrlhf.configs.validate import check_grpo, check_lengths, check_sft
from mindrlhf.data.mindrecord import read_prompts
from mindrlhf.records.formats import read_record

PROMPT_TOKENS = 48  # no question of the task is longer


@pytest.fixture
def example(root):
    return root / "examples" / "qwen_grpo_tutorial"


def test_settings_pass_the_checks_of_a_run(root, example):
    models = root / "model_configs" / "qwen_grpo"
    train, infer = (load_model_yaml(models / f"{role}_qwen2_tiny.yaml") for role in ("finetune", "predict"))
    model = train.architecture()
    grpo = load_grpo_config(example / "quickstart_grpo.yaml", (), infer.sampling_defaults())
    sft = load_sft_config(example / "quickstart_sft.yaml")
    check_grpo(grpo, train, infer, model, infer.architecture(), workers=1)
    check_sft(sft, train, model, workers=1)
    check_lengths(grpo, train, model, PROMPT_TOKENS)
    assert grpo.rollout.temperature == 1.0, "ratios are of the distribution that was sampled"
    script = (root / "scripts" / "quickstart.sh").read_text()
    assert f"--max_new_tokens {grpo.rollout.max_new_tokens} " in script, "evaluation allows what training allows"


@pytest.mark.parametrize("arguments", [["--steps", "0"], ["--steps", "3x"], ["--seed", "-1"], ["--out"], ["now"]])
def test_a_wrong_option_is_refused_before_anything_is_done(root, tmp_path, arguments):
    done = run(root, tmp_path, *arguments)
    assert done.returncode == 2
    assert re.fullmatch(r"quickstart\.sh: .*give --seed N, --out DIR or --steps N\n", done.stderr)
    assert done.stdout == ""


@pytest.mark.slow
@pytest.mark.msrun
@pytest.mark.timeout(1200)
def test_every_step_of_it_works(root, tmp_path):
    if not (root / ".venv" / "installed-base").exists() and not (root / ".venv" / "installed-dev").exists():
        pytest.skip("no .venv: scripts/setup.sh has not been run, and a test does not fetch 800 MB")
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
    assert "step 2/2 | reward" in done.stdout, "the worker's lines come to the console"
    assert len((out / "grpo" / "metrics.jsonl").read_text().splitlines()) == 2
    assert len(read_record(out / "grpo" / "rollouts.mindrecord")) == 2
    assert list((out / "grpo" / "tensorboard").iterdir())
    assert (out / "grpo" / "hf" / "config.json").exists()
    assert (out / "reward_curve.png").read_bytes().startswith(b"\x89PNG")


def run(root, folder, *arguments: str) -> subprocess.CompletedProcess:
    """The script, started in `folder`."""
    command = ["bash", str(root / "scripts" / "quickstart.sh"), *arguments]
    return subprocess.run(command, cwd=folder, env=os.environ, capture_output=True, text=True, timeout=1100)
