"""scripts/two_hosts.sh: four workers on two network namespaces, to a good end and to a bad one."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import jobs
import numpy as np
import pytest
from workers import ROOT

SCRIPT = ROOT / "scripts" / "two_hosts.sh"
MISSING_RIGHT = 3

# Rank 2 is on the other host than msrun's scheduler, and is waited for by all.
DYING = """
import os, signal
from mindrlhf.backend.comm.collectives import Collectives
from mindrlhf.backend.process.launch import launch

with launch("CPU") as world:
    Collectives(world).barrier()
    if world.rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    Collectives(world).barrier()
"""


def run(*arguments: str | Path) -> subprocess.CompletedProcess:
    """The script with this Python's commands; skips the test where it may not make namespaces."""
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    env["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{env['PATH']}"
    command = ["bash", str(SCRIPT), *map(str, arguments)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=400)
    if done.returncode == MISSING_RIGHT:
        pytest.skip(done.stderr.strip())
    return done


def namespaces() -> str:
    """Those of this script that there are."""
    if shutil.which("ip") is None:
        return ""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return "\n".join(line for line in listed.splitlines() if line.startswith("mindrlhf-"))


@pytest.mark.slow
@pytest.mark.msrun
def test_the_default_job_runs_on_two_hosts(tmp_path):
    done = run("--out", tmp_path / "here")
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^ *2/2 ", done.stdout, re.MULTILINE), "a line of the last step"
    assert "both hosts ended well" in done.stdout
    for host in range(2):
        logs = sorted(path.name for path in (tmp_path / "here/log" / f"host{host}").glob("worker_*.log"))
        assert logs == [f"worker_{rank}.log" for rank in (2 * host, 2 * host + 1)]
    assert (tmp_path / "here/ckpt/hf/model.safetensors").is_file()
    assert namespaces() == ""


@pytest.mark.slow
@pytest.mark.msrun
def test_a_cut_cable_between_trainer_and_generators_changes_no_bit(tmp_path):
    """For 20 s, of which TCP's own waits make more."""
    runs = {"plain": (), "cut": ("--cut", "20")}
    for name, options in runs.items():
        done = run("--out", tmp_path / name, "--split", *options)
        assert done.returncode == 0, done.stdout + done.stderr
        assert ("the cable was cut for 20 s" in done.stdout) == (name == "cut")
        assert "training on ranks 0 to 1 and generation on ranks 2 to 3" in done.stdout
    plain, cut = (jobs.Run(tmp_path / name) for name in runs)
    for found, expected in zip(cut.kept_metrics, plain.kept_metrics, strict=True):
        for name, value in expected.items():
            assert name.endswith("/idle_ratio") or found[name] == pytest.approx(value, rel=0, nan_ok=True), name
    np.testing.assert_equal(cut.weights, plain.weights)
    assert namespaces() == ""


@pytest.mark.slow
@pytest.mark.msrun
def test_a_worker_that_is_killed_ends_both_hosts(tmp_path):
    (tmp_path / "dying.py").write_text(DYING)
    done = run("--out", tmp_path / "here", "--", tmp_path / "dying.py")
    logs = [(tmp_path / f"here/log/host{rank // 2}/worker_{rank}.log").read_text() for rank in range(4)]
    assert done.returncode == 1
    for rank in (0, 1, 3):
        assert f"rank {rank} of 4: rank 2 is gone" in logs[rank]
    assert re.search(r"host 0 \(10\.77\.0\.1\) ended with code 1:.*rank 2 is gone", done.stderr, re.DOTALL)
    assert "host 1 (10.77.0.2) ended with code 1:" in done.stderr
    assert namespaces() == ""


@pytest.mark.parametrize("arguments", [["--steps", "2"], ["now"], ["--cut", "long"]])
def test_a_wrong_option_is_refused_before_anything_is_done(arguments):
    done = run(*arguments)
    assert done.returncode == 2
    message = "--cut needs a number" if "--cut" in arguments else ".* is not understood; give --out DIR, "
    assert re.fullmatch(rf"two_hosts\.sh: {message}.*\n", done.stderr)
    assert done.stdout == ""


def test_without_the_command_ip_it_says_so(tmp_path):
    """On a PATH with nothing but what the script needs before that."""
    for name in ("bash", "dirname", "realpath"):
        (tmp_path / name).symlink_to(shutil.which(name))
    command = [str(tmp_path / "bash"), str(SCRIPT), "--out", str(tmp_path / "here")]
    done = subprocess.run(command, env={"PATH": str(tmp_path)}, capture_output=True, text=True)
    assert done.returncode == MISSING_RIGHT
    assert done.stderr == "two_hosts.sh: the command ip is missing; install iproute2\n"
    assert not (tmp_path / "here").exists()
