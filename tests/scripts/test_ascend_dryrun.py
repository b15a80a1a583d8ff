"""tools/ascend_dryrun.sh: what it hands to each rank, its refusals, and two ranks of a tiny pair on the CPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jobs
import pytest
from workers import ROOT

SCRIPT = ROOT / "tools" / "ascend_dryrun.sh"
# Shows its words and MindSpore's variables, and answers like a rank; rank 1 fails if it is told to.
PYTHON = """#!/usr/bin/env bash
if [[ $2 == mindrlhf.memory.simulated ]]; then PYTHONPATH={root} exec {python} "$@"; fi
printf '%s\\n' "$@" "GLOG_v=$GLOG_v"
[[ "${{*: -1}}" == 1 && -n ${{FAILS:-}} ]] && exit 1
echo "Used peak memory usage (without fragments): 1024M" >&2
echo '{{"graphs": [], "seconds": 1, "planned_bytes": 1, "process_bytes": 1}}'
"""


def run(folder: Path, *arguments: object, **variables: str) -> subprocess.CompletedProcess:
    path = os.pathsep.join((str(folder / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]))
    environment = os.environ | {"PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | variables
    for name in ("GLOG_v", "MS_SIMULATION_LEVEL"):
        environment.pop(name, None)
    command = ["bash", str(SCRIPT), *map(str, arguments)]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)


@pytest.fixture
def shown(tmp_path):
    """A folder whose `python` shows what it is called with."""
    program = tmp_path / "bin" / "python"
    program.parent.mkdir()
    program.write_text(PYTHON.format(root=ROOT, python=sys.executable))
    program.chmod(0o755)
    return tmp_path


def handed(folder: Path, rank: int) -> list[str]:
    return (folder / "out" / "ascend_dryrun" / f"rank_{rank}.out").read_text().splitlines()[:-1]


def test_the_7b_pair_on_8_ranks_by_default(shown):
    done = run(shown, "seed=3", "--mind_dataset_dir", "a file")
    assert done.returncode == 0, done.stderr
    folder = ROOT / "model_configs" / "qwen_grpo"
    for rank in range(8):
        *words, level = handed(shown, rank)
        assert words == [
            *("-m", "mindrlhf", "dry-run", "--sft_path_train", str(folder / "finetune_qwen2_5_7b.yaml")),
            *("--sft_path_infer", str(folder / "predict_qwen2_5_7b_instruct.yaml"), "--device", "Ascend"),
            *("--ranks", "8", "seed=3", "--mind_dataset_dir", "a file", "--rank", str(rank)),
        ]
        assert level == "GLOG_v=1"
    assert done.stdout.count("1.00 GiB") == 8


def test_what_is_given_goes_first(shown):
    done = run(shown, "a.yaml", "b.yaml", "--ranks=2", "--device", "CPU", AT_ONCE="2", OUT="out/ascend_dryrun")
    assert done.returncode == 0, done.stderr
    words = handed(shown, 1)
    assert words[3:] == [
        *("--sft_path_train", "a.yaml", "--sft_path_infer", "b.yaml", "--device", "CPU", "--ranks", "2"),
        *("--rank", "1", "GLOG_v=3"),
    ]


def test_a_failed_rank_is_named(shown):
    done = run(shown, "--ranks", 3, FAILS="yes")
    assert done.returncode == 1
    assert done.stdout.splitlines()[-1] == "rank 1 failed: see out/ascend_dryrun/rank_1.log"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["a.yaml"], "a.yaml is one YAML; give one of training and one of generation, or none"),
        (["a.yaml", "--ranks", "2"], "a.yaml is one YAML"),
        (["--ranks", "two"], "--ranks is 'two'; give the number of ranks that the YAMLs ask for"),
        (["--ranks"], "--ranks is ''; give the number"),
    ],
)
def test_a_wrong_option_is_refused(tmp_path, arguments, message):
    done = run(tmp_path, *arguments)
    assert done.returncode == 2
    assert done.stderr.startswith(f"ascend_dryrun.sh: {message}")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_two_ranks_on_the_cpu(tmp_path):
    jobs.write_yamls(tmp_path, 300, layers=1)
    layouts = (*jobs.layout("train", "tp2"), *jobs.layout("infer", "dp2"))
    small = ("--prompt_tokens", 32, "data.prompts_per_step=2", "rollout.max_new_tokens=16", "algorithm.beta=0")
    done = run(tmp_path, "train.yaml", "infer.yaml", "--ranks", 2, "--device", "CPU", *small, *layouts, AT_ONCE="2")
    assert done.returncode == 0, done.stderr
    found = [
        json.loads((tmp_path / f"out/ascend_dryrun/rank_{rank}.out").read_text().splitlines()[-1]) for rank in (0, 1)
    ]
    assert [one["rank"] for one in found] == [0, 1]
    *_, first, second, note = done.stdout.splitlines()
    for row, one in zip((first, second), found, strict=True):
        assert row.split()[:2] == [str(one["rank"]), str(len(one["graphs"]))]
    assert note.startswith("no peak in the log of rank 0, 1")


def test_without_cann_it_says_what_it_needs(tmp_path):
    done = run(tmp_path)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("mindrlhf dry-run: Ascend is simulated with CANN's libraries, which MindSpore does not find")
    assert "docker/Dockerfile.ascend" in line
    assert not (tmp_path / "out" / "ascend_dryrun" / "rank_1.out").exists()
