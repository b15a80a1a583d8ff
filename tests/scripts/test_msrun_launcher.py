"""MindFormers' launcher and script under their names: what they hand to msrun and to the commands."""

import os
import runpy
import subprocess

import pytest


def launched(root, tmp_path, *arguments: str) -> subprocess.CompletedProcess:
    """The launcher, with an msrun that prints its arguments."""
    (tmp_path / "msrun").write_text('#!/bin/sh\nfor word; do echo "$word"; done\n')
    (tmp_path / "msrun").chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    script = root / "scripts" / "msrun_launcher.sh"
    return subprocess.run(["bash", script, *arguments], env={"PATH": path}, capture_output=True, text=True)


ORDER = "tools/run_qwen2_5.py --config F --run_mode finetune --train_data D"


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        ((), {"worker_num": "8", "local_worker_num": "8", "node_rank": "0", "join": "False"}),
        (("2",), {"worker_num": "2", "local_worker_num": "2", "master_addr": "127.0.0.1"}),
        (
            ("8", "9000", "log", "True", "300"),
            {"worker_num": "8", "master_port": "9000", "log_dir": "log", "join": "True", "cluster_time_out": "300"},
        ),
        (
            ("16", "8", "10.0.0.1", "9000", "1", "log", "False", "300"),
            {
                "worker_num": "16",
                "local_worker_num": "8",
                "master_addr": "10.0.0.1",
                "node_rank": "1",
                "log_dir": "log",
            },
        ),
    ],
)
def test_arguments_of_msrun(root, tmp_path, arguments, wanted):
    result = launched(root, tmp_path, ORDER, *arguments)
    words = result.stdout.splitlines()
    given = dict(word.removeprefix("--").split("=") for word in words if "=" in word)
    assert wanted.items() <= given.items()
    assert words[-len(ORDER.split()) :] == ORDER.split()


def test_another_number_of_arguments_is_refused(root, tmp_path):
    result = launched(root, tmp_path, ORDER, "8", "9000")
    assert result.returncode == 2
    assert "WORKERS LOCAL_WORKERS MASTER_ADDR" in result.stderr


def test_the_script_calls_the_commands(root):
    line = runpy.run_path(str(root / "tools" / "run_qwen2_5.py"))["command_line"]
    words = [
        "--config",
        "F",
        "--run_mode",
        "finetune",
        "--train_data",
        "D",
        "--load_checkpoint",
        "M",
        "trainer.epochs=2",
    ]
    assert line(words) == [
        *("sft", "--sft_path_train", "F", "--mind_dataset_dir", "D"),
        *("--load_sft_checkpoint_train", "M", "trainer.epochs=2"),
    ]
    words = ["--run_mode", "predict", "--config", "F", "--load_checkpoint", "M", "--predict_data", "two words"]
    assert line(words) == ["generate", "--model", "M", "--prompt", "two words"]


def test_weights_are_converted_under_both_names(root):
    for folder in ("tools", "research/qwen2_5"):
        assert 'run("convert"' in (root / folder / "convert_weight.py").read_text()
