"""Two ranks, by msrun and on two nodes of a Ray cluster on this machine (skipped without Ray); one rank is killed."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import jobs
import numpy as np
import psutil
import pytest

from mindrlhf.backend.process.start import free_port
from mindrlhf.checkpoint.manifest import MANIFEST_FILE
from mindrlhf.files.naming import step_path

pytestmark = [pytest.mark.slow, pytest.mark.msrun]

# A reward that waits, while the file `hold` is there, once the checkpoint that it names is there.
HOLDING = """
from pathlib import Path
from time import sleep

HOLD = Path(__file__).with_name("hold")

def variety(prompt, completion, fields):
    while HOLD.exists() and Path(HOLD.read_text()).exists():
        sleep(0.05)
    return len(set(completion)) / 10
"""
PATIENCE_S = 240


@pytest.fixture(scope="module")
def address():
    """A cluster of two nodes with one processor each."""
    pytest.importorskip("ray", reason="Ray is not installed (pip install 'mindrlhf[ray]')")
    from ray.cluster_utils import Cluster

    node = {"num_cpus": 1, "object_store_memory": 100 << 20}
    cluster = Cluster(initialize_head=True, head_node_args=node | {"include_dashboard": False})
    cluster.add_node(**node)
    yield cluster.address
    cluster.shutdown()


@pytest.fixture(scope="module")
def task(tmp_path_factory) -> jobs.Task:
    task = jobs.make_task(tmp_path_factory.mktemp("task"))
    (task.folder / "reward.py").write_text(HOLDING)
    return task


@pytest.fixture(params=["ray", "msrun"])
def starter(request) -> list[str]:
    """Words that choose the launcher."""
    if request.param == "msrun":
        return ["--with", "msrun", "--master_port", str(free_port())]
    return ["--with", "ray", "--ray_address", request.getfixturevalue("address")]


def launched(starter: list[str], folder: Path, *words: object) -> tuple[subprocess.Popen, Path]:
    """The launcher with two workers, and the file of its output."""
    folder.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "mindrlhf", "launch", "--workers", "2", *starter, *map(str, words)]
    output = folder / "launch.log"
    with output.open("w") as out:
        environment = os.environ | {"PYTHONPATH": str(jobs.ROOT), "OMP_NUM_THREADS": "1"}
        return subprocess.Popen(command, cwd=folder, env=environment, stdout=out, stderr=subprocess.STDOUT), output


def rank_of(process: subprocess.Popen, output: Path, number: int) -> psutil.Process:
    """A rank: a descendant of the launcher, or the process that it names."""
    pids = dict(re.findall(r"^rank (\d): process (\d+) on ", output.read_text(), re.MULTILINE))
    known = [psutil.Process(int(pids[str(number)]))] if pids else psutil.Process(process.pid).children(recursive=True)
    (rank,) = [one for one in known if "mindrlhf" in one.cmdline() and is_rank(one.environ(), number)]
    return rank


def without_waiting(run: jobs.Run) -> list[dict]:
    return [{name: row[name] for name in row if not name.endswith("/idle_ratio")} for row in run.kept_metrics]


def is_rank(environment: dict[str, str], number: int) -> bool:
    return (environment.get("MS_ROLE"), environment.get("RANK_ID")) == ("MS_WORKER", str(number))


TOGETHER = (*jobs.layout("train", "dp2"), *jobs.layout("infer", "dp2"))
# Rank 0 trains, and rank 1, which is killed, generates one step ahead.
APART = ("--trainer_ranks", "1", "--generator_ranks", "1", "trainer.staleness=1")


def training(task: jobs.Task, folder: Path, layout: Sequence[str] = TOGETHER) -> list[str]:
    return task.train(folder, *layout, "trainer.total_steps=4", "trainer.save_freq=1", "seed=5")


def wait_until(condition, process: subprocess.Popen, output: Path) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert process.poll() is None, output.read_text()[-3000:]
        assert time.monotonic() < deadline, output.read_text()[-3000:]
        time.sleep(0.1)


@pytest.mark.parametrize("layout", [TOGETHER, APART], ids=["together", "apart"])
def test_a_killed_rank_is_started_again_and_resumed_to_the_last_bit(starter, task, tmp_path, layout):
    whole = tmp_path / "whole"
    process, output = launched(starter, whole, *training(task, whole, layout))
    assert process.wait(PATIENCE_S) == 0, output.read_text()[-3000:]

    killed = tmp_path / "killed"
    hold = task.folder / "hold"
    hold.write_text(str(step_path(killed / "ckpt", 2)))
    said = killed_and_started_again(starter, killed, training(task, killed, layout), after=2, hold=hold)

    if "ray" in starter:
        assert len(re.findall(r"^rank \d: process", said, re.MULTILINE)) == 4
    logs = killed / "out" / "launch"
    assert {path.name for path in (logs / "start_2").iterdir()} >= {"scheduler.log", "worker_0.log", "worker_1.log"}
    assert_equal_runs(jobs.Run(whole), jobs.Run(killed), steps=4)


def killed_and_started_again(
    starter: list[str], folder: Path, words: Sequence[object], after: int, hold: Path | None = None
) -> str:
    """What the launcher said of a training whose rank 1 was killed when step `after` was saved, and that ended well.

    hold: a file while which the run stays behind that step, where its reward function waits.
    """
    process, output = launched(starter, folder, "--retries", "1", *words)
    wait_until((step_path(folder / "ckpt", after) / MANIFEST_FILE).exists, process, output)
    rank_of(process, output, 1).kill()
    if hold is not None:
        hold.unlink()
    assert process.wait(PATIENCE_S) == 0, output.read_text()[-3000:]
    said = output.read_text()
    assert "starting again from the last checkpoint (1 of 1)" in said
    if "ray" in starter:
        assert re.search(r"mindrlhf launch: worker 1 on \S+ was ended by SIGKILL: ", said)
    return said


def assert_equal_runs(first: jobs.Run, second: jobs.Run, steps: int) -> None:
    assert first.weights.keys() == second.weights.keys()
    for name, array in first.weights.items():
        np.testing.assert_array_equal(array, second.weights[name])
    assert without_waiting(first) == without_waiting(second)
    assert [row["step"] for row in second.metrics] == [*range(1, steps + 1)]


@pytest.fixture(scope="module")
def warm_start(root, tmp_path_factory) -> Path:
    """What `bash scripts/quickstart.sh` writes before GRPO: problems, tokenizer and a fine-tuned model."""
    folder = tmp_path_factory.mktemp("quickstart")
    command = ["bash", root / "scripts" / "quickstart.sh", "--steps", "1", "--out", folder]
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_the_quick_start_on_two_workers_learns_as_if_none_had_been_killed(address, root, warm_start, tmp_path):
    """Its own settings and 60 steps, with the batch split over two workers of a Ray cluster."""

    def words(folder: Path) -> list[object]:
        flags = {
            "sft_path_infer": root / "model_configs/qwen_grpo/predict_qwen2_tiny.yaml",
            "sft_path_train": root / "model_configs/qwen_grpo/finetune_qwen2_tiny.yaml",
            "grpo_config": root / "examples/qwen_grpo_tutorial/quickstart_grpo.yaml",
            "load_sft_checkpoint_infer": warm_start / "sft" / "hf",
            "mind_dataset_dir": warm_start / "data" / "train.mindrecord",
            "vocab_path": warm_start / "data" / "vocab.json",
            "merges_file_path": warm_start / "data" / "merges.txt",
            "save_ckpt_dir": folder / "ckpt",
            "output_dir": folder,
        }
        given = [part for name, value in flags.items() for part in (f"--{name}", value)]
        return ["train", *given, *TOGETHER, "trainer.save_freq=10"]

    starter = ["--with", "ray", "--ray_address", address]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    process, output = launched(starter, whole, *words(whole))
    assert process.wait(PATIENCE_S) == 0, output.read_text()[-3000:]
    killed_and_started_again(starter, killed, words(killed), after=20)

    assert_equal_runs(jobs.Run(whole), jobs.Run(killed), steps=60)
    command = [sys.executable, "-m", "mindrlhf", "eval", "--model", killed / "ckpt" / "hf", "--slots", "256"]
    command += ["--data", warm_start / "data" / "test.mindrecord", "--max_new_tokens", "24"]
    command += ["--output", tmp_path / "answers.jsonl"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert float(re.findall(r'"accuracy": ([0-9.]+)', done.stdout)[-1]) >= 0.85


def test_a_users_mistake_is_not_tried_again(address, task, tmp_path):
    words = [*training(task, tmp_path), "rollout.num_generations=1"]
    process, output = launched(["--with", "ray", "--ray_address", address], tmp_path, "--retries", "3", *words)
    assert process.wait(PATIENCE_S) == 2
    said = output.read_text()
    assert "num_generations" in said
    assert "starting again" not in said


def test_a_cluster_that_is_too_small_is_said(address, task, tmp_path):
    words = ["--resource", "NPU=1", *training(task, tmp_path)]
    process, output = launched(["--with", "ray", "--ray_address", address], tmp_path, *words)
    assert process.wait(PATIENCE_S) == 2
    assert "--with ray: 2 ranks take 2 NPU, and the cluster has 0 NPU." in output.read_text()


def test_a_request_to_stop_saves(starter, task, tmp_path):
    hold = task.folder / "hold"
    saved = step_path(tmp_path / "ckpt", 1)
    hold.write_text(str(saved))
    process, output = launched(starter, tmp_path, "--retries", "1", *training(task, tmp_path))
    wait_until((saved / MANIFEST_FILE).exists, process, output)
    process.terminate()
    hold.unlink()
    assert process.wait(PATIENCE_S) == 0, output.read_text()[-3000:]
    assert "starting again" not in output.read_text()
    assert not (tmp_path / "out" / "launch" / "start_2").exists()
