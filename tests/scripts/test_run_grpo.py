"""scripts/run_grpo.sh: what it hands to msrun, and a job of the tiny model on this machine."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from workers import ROOT

from mindrlhf.commands import train

SCRIPT = ROOT / "scripts" / "run_grpo.sh"
TINY = [f"--sft_path_{role}={ROOT}/model_configs/qwen_grpo/{name}_qwen2_tiny.yaml" for role, name in (
    ("infer", "predict"), ("train", "finetune"))]  # fmt: skip


def run(folder: Path, *arguments: object, **variables: str) -> subprocess.CompletedProcess:
    path = os.pathsep.join((str(folder), str(Path(sys.executable).parent), os.environ["PATH"]))
    environment = os.environ | {"PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | variables
    command = ["bash", str(SCRIPT), *map(str, arguments)]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


@pytest.fixture
def handed(tmp_path):
    """Runs the script with an msrun that only shows its arguments; returns (msrun's, script, the script's)."""
    (tmp_path / "msrun").write_text('#!/usr/bin/env bash\nprintf "%s\\n" "$@"\n')
    (tmp_path / "msrun").chmod(0o755)

    def words(*arguments, **variables):
        given = run(tmp_path, *arguments, **variables).stdout.splitlines()
        place = next(index for index, word in enumerate(given) if word.endswith("grpo_one_stage.py"))
        return given[:place], given[place], given[place + 1 :]

    return words


def parsed(words):
    import argparse

    parser = argparse.ArgumentParser()
    train.add_arguments(parser)
    return parser.parse_args(words)


def test_eight_workers_and_the_7b_pair_by_default(handed):
    launch, script, words = handed("--mind_dataset_dir", "a.mindrecord")
    assert {"--worker_num=8", "--local_worker_num=8", "--master_port=9190", "--log_dir=qwen2_5_one_log"} <= set(launch)
    assert Path(script).is_file()
    args = parsed(words)
    assert Path(args.sft_path_train).name == "finetune_qwen2_5_7b.yaml"
    assert Path(args.sft_path_train).is_file()
    assert Path(args.sft_path_infer).is_file()


def test_what_is_given_goes_first(handed):
    given = {"WORKER_NUM": "16", "LOCAL_WORKER_NUM": "8", "NODE_RANK": "1", "MASTER_ADDR": "10.0.0.1", "LOG_DIR": "log"}
    launch, _, words = handed("--sft_path_train", "mine.yaml", "seed=3", **given)
    assert {"--worker_num=16", "--local_worker_num=8", "--node_rank=1", "--master_addr=10.0.0.1"} <= set(launch)
    args = parsed(words)
    assert args.sft_path_train == "mine.yaml"
    assert args.overrides == ["seed=3"]


def test_a_dry_run_prints_the_command_and_starts_nothing(tmp_path):
    (tmp_path / "msrun").write_text("#!/usr/bin/env bash\ntouch started\n")
    (tmp_path / "msrun").chmod(0o755)
    shown = run(tmp_path, "--dry-run", "--mind_dataset_dir", "a file", "seed=3", WORKER_NUM="2")
    assert shown.returncode == 0
    assert not (tmp_path / "started").exists()
    (line,) = shown.stdout.splitlines()
    words = shlex.split(line)
    assert words[:3] == ["msrun", "--worker_num=2", "--local_worker_num=2"]
    assert words[-3:] == ["--mind_dataset_dir", "a file", "seed=3"]


@pytest.mark.slow
def test_a_job_of_the_tiny_model(tmp_path):
    def command(*words):
        python = [sys.executable, "-m", "mindrlhf", *map(str, words)]
        subprocess.run(python, check=True, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True)

    data = tmp_path / "data"
    sizes = ("--train_size", 40, "--test_size", 8, "--max_number", 20, "--tokenizer_vocab_size", 300)
    command("synthesize", "--output_dir", data, *sizes)
    kind = ("--dataset_type", "arithmetic", "--template", "plain", "--tokenizer_path", data)
    command("data", "--file_path", data / "train.jsonl", "--output_path", data / "train.mindrecord", *kind)
    done = run(
        tmp_path,
        *TINY,
        *("--tokenizer_path", data, "--mind_dataset_dir", data / "train.mindrecord"),
        *("data.prompts_per_step=4", "rollout.num_generations=4", "rollout.max_new_tokens=16", "trainer.total_steps=1"),
        WORKER_NUM="1",
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out" / "run_grpo" / "ckpt" / "hf" / "config.json").is_file()
    assert (tmp_path / "qwen2_5_one_log" / "worker_0.log").is_file()
