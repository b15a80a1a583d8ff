"""The guard against lost speed: what it makes of rounds, the other revision's folder, and its exit codes."""

import math
import subprocess
import sys
from pathlib import Path

import pytest
from workers import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))

import guard
from compare import BusyError, Run
from comparison_jobs import JOBS

from mindrlhf.errors import UserError


def ran(step: float, memory: float = 500.0) -> Run:
    median = {"step": step, "gen": step / 4, "logprob": step / 8, "train": step / 2}
    result = {"median": median, "peak_rss_mib": memory, "versions": {}, "start_to_first_step_s": 10.0 * step}
    return Run(result, 0.0)


def rounds(*pairs: tuple[float, float]) -> list[dict[str, Run]]:
    """Of (old, new) seconds of a step."""
    return [{guard.OLD: ran(old), guard.NEW: ran(new, 600.0)} for old, new in pairs]


def test_ratios_are_geometric_means_with_the_interval_of_their_logarithms():
    found = guard.outcome("reference", rounds((1.0, 1.1), (2.0, 2.0), (1.0, 1.21)))
    assert found.step == pytest.approx(1.1)
    # Logarithms log 1.1 * (1, 0, 2): their deviation is log 1.1, and 2 degrees of freedom have the quantile 4.3027.
    half = 4.3027 * math.log(1.1) / math.sqrt(3)
    assert (found.low, found.high) == pytest.approx((1.1 * math.exp(-half), 1.1 * math.exp(half)), rel=1e-4)
    assert (found.old, found.new) == (1.0, 1.21)
    assert found.parts == pytest.approx(
        {"gen": 1.1, "logprob": 1.1, "train": 1.1, "memory": 1.2} | {guard.PARTS[-1]: 1.1}
    )


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A project with two commits."""
    folder = tmp_path / "project"
    (folder / "benchmarks").mkdir(parents=True)
    git = ["git", "-C", str(folder), "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run([*git[:3], "init", "-q"], check=True)
    for text in ("first", "second"):
        (folder / "benchmarks" / "grpo_step.py").write_text(text)
        subprocess.run([*git, "add", "."], check=True)
        subprocess.run([*git, "commit", "-qm", text], check=True)
    monkeypatch.setattr(guard, "ROOT", folder)
    return folder


def test_the_other_revision_has_a_folder_of_its_own(repository):
    with guard.tree_of("HEAD~1") as tree:
        assert (tree / "benchmarks" / "grpo_step.py").read_text() == "first"
        assert (repository / "benchmarks" / "grpo_step.py").read_text() == "second"
    assert not tree.exists()
    listed = subprocess.run(["git", "-C", repository, "worktree", "list"], capture_output=True, text=True, check=True)
    assert len(listed.stdout.splitlines()) == 1
    with pytest.raises(UserError, match="--old nowhere: git cannot check it out"), guard.tree_of("nowhere"):
        pass


def test_both_sides_run_the_same_work():
    args = guard.arguments(["--dtype", "bfloat16", "rollout.weights=int8"])
    for name in ("qwen3", "long-prompt"):
        new, old = (guard.side(guard.NEW, tree, JOBS[name], args).command(Path("x")) for tree in (ROOT, Path("/old")))
        assert new[0] == old[0]
        assert (new[1], old[1]) == (f"{ROOT}/benchmarks/grpo_step.py", "/old/benchmarks/grpo_step.py")
        assert new[2:] == old[2:]
        assert new[-1] == "rollout.weights=int8"
        assert ("qwen3" in new) == (name == "qwen3")


@pytest.mark.parametrize(
    ("new", "code", "said"),
    [
        ([1.00, 1.01, 0.99], 0, ""),
        ([1.10, 1.11, 1.09], 1, "slower than HEAD: reference"),
        ([1.10, 0.80, 1.40], 0, ""),  # nobody can tell
    ],
)
def test_exit_codes(repository, monkeypatch, capsys, new, code, said):
    monkeypatch.setattr(guard, "quiet_rounds", lambda args, job, sides: rounds(*((1.0, one) for one in new)))
    assert guard.main(["--old", "HEAD", "--job", "reference"]) == code
    out = capsys.readouterr().out
    assert "| reference | 1.000 s |" in out
    assert said in out


def test_a_busy_machine_judges_nothing(repository, monkeypatch, capsys):
    def busy(args, job, sides):
        raise BusyError("only 1 of 3 rounds were quiet")

    monkeypatch.setattr(guard, "quiet_rounds", busy)
    assert guard.main(["--old", "HEAD"]) == 3
    assert "only 1 of 3 rounds" in capsys.readouterr().err
    assert guard.main(["--old", "nowhere"]) == 2
