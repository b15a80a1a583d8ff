"""The guard against lost speed: what it makes of rounds, the other revision's folder, and its exit codes."""

import math
import subprocess
import sys
from pathlib import Path

import pytest
from workers import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))

import compare
import guard
from compare import BusyError, Run
from comparison_jobs import JOBS

from mindrlhf.errors import UserError


def row(step: float, others: float = 0.0, compile_s: float = 0.0) -> dict[str, float]:
    return {"step": step, "gen": step / 4, "logprob": step / 8, "train": step / 2, "others": others} | {
        "compile": compile_s
    }


def ran(step: float, memory: float = 500.0) -> Run:
    rows = [row(step), row(2 * step), row(8 * step)]
    result = {"median": rows[1], "per_step": rows, "peak_rss_mib": memory, "versions": {}}
    return Run({**result, "start_to_first_step_s": 10.0 * step}, 0.0)


def rounds(*pairs: tuple[float, float]) -> list[dict[str, Run]]:
    """Of (old, new) seconds of a step."""
    return [{guard.OLD: ran(old), guard.NEW: ran(new, 600.0)} for old, new in pairs]


def test_ratios_are_geometric_means_with_the_interval_of_their_logarithms():
    found = guard.outcome("reference", rounds((1.0, 1.1), (2.0, 2.0), (1.0, 1.21)))
    assert found.step == pytest.approx(1.1)
    # Logarithms log 1.1 * (1, 0, 2): their deviation is log 1.1, and 2 degrees of freedom have the quantile 4.3027.
    half = 4.3027 * math.log(1.1) / math.sqrt(3)
    assert (found.low, found.high) == pytest.approx((1.1 * math.exp(-half), 1.1 * math.exp(half)), rel=1e-4)
    assert (found.old, found.new) == (2.0, 2.42)
    assert found.parts == pytest.approx(
        {"gen": 1.1, "logprob": 1.1, "train": 1.1, "memory": 1.2} | {guard.PARTS[-1]: 1.1}
    )


def test_steps_are_compared_in_pairs():
    """A machine that is ten times as slow for one step of each: medians of the sides would say 1."""
    old, new = ran(1.0), ran(1.0)
    old.result["per_step"][:] = [row(1.0), row(20.0), row(2.0)]
    new.result["per_step"][:] = [row(1.1), row(22.0), row(2.2)]
    assert guard.outcome("reference", [{guard.OLD: old, guard.NEW: new}] * 2).step == pytest.approx(1.1)


def test_only_steps_that_both_sides_did_undisturbed_are_kept():
    warmup = [row(9.0)] * guard.WARMUP
    old = [*warmup, row(1.0), row(2.0, others=0.5), row(3.0), row(4.0)]
    new = [*warmup, row(1.5), row(2.5), row(3.5, compile_s=0.1), row(4.5)]
    made = guard.in_pairs(
        {name: {"args": {"max_others": 0.2}, "per_step": rows} for name, rows in (("o", old), ("n", new))}
    )
    steps = {name: [one["step"] for one in run.result["per_step"]] for name, run in made.items()}
    assert steps == {"o": [1.0, 4.0], "n": [1.5, 4.5]}
    assert {name: (run.result["clean_steps"], run.result["median"]["step"]) for name, run in made.items()} == {
        "o": (2, 2.5),
        "n": (2, 3.0),
    }


STEPPING = """
import argparse, json, pathlib

def one_step(name, step):
    with open({log!r}, "a") as log:
        log.write(f"{{name}}{{step}} ")

def peak_mib():
    print("something else", flush=True)

def main(argv):
    name, path, steps = argv
    for step in range(1, int(steps) + 1):
        one_step(name, step)
    peak_mib()
    if int(steps) > 4:
        raise SystemExit("no more than four")
    row = dict(step=1.0, others=0.0, compile=0.0)
    pathlib.Path(path).write_text(json.dumps(dict(args=dict(max_others=0.1), per_step=[row] * int(steps))))
    return 0
"""


def order_of_steps(folder: Path, steps: int, run=guard.take_turns) -> str:
    """The order in which two programs do their steps."""
    log, script = folder / "log", folder / "stepping.py"
    script.write_text(STEPPING.format(log=str(log)))
    command = [sys.executable, str(guard.GATE), str(script)]
    sides = [compare.Side(name, lambda path, name=name: [*command, name, str(path), str(steps)]) for name in "ab"]
    made = run(sides, folder / "run.json")
    assert [run.result["clean_steps"] for run in made.values()] == [steps - guard.WARMUP] * 2
    return log.read_text()


def test_both_sides_take_turns(tmp_path):
    """The first step of each, in which graphs are built, is not between the other's steps."""
    assert order_of_steps(tmp_path, 4) == "a1 b1 a2 b2 b3 a3 a4 b4 "


def test_whole_runs_follow_each_other(tmp_path):
    assert order_of_steps(tmp_path, 3, guard.whole_runs) == "a1 a2 a3 b1 b2 b3 "


def test_a_side_that_fails_is_named_and_ends_the_other(tmp_path):
    with pytest.raises(UserError, match=r"[ab] ended with exit code 1: no more than four"):
        order_of_steps(tmp_path, 5)


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
        assert (new[2], old[2]) == (f"{ROOT}/benchmarks/grpo_step.py", "/old/benchmarks/grpo_step.py")
        assert [*new[:2], *new[3:]] == [*old[:2], *old[3:]]
        assert new[-1] == "rollout.weights=int8"
        assert ("qwen3" in new) == (name == "qwen3")


def test_a_model_that_sees_is_written_once_for_both_sides(tmp_path, monkeypatch):
    """Its shape is no flag: without the folder both sides would run another job, of text."""
    written = []
    monkeypatch.setattr("compare.write_model", lambda folder: written.append(folder) or _touch(folder))
    args = guard.arguments([])
    args.output = tmp_path
    sides = [guard.side(guard.NEW, tree, JOBS["vision"], args).command(Path("x")) for tree in (ROOT, Path("/old"))]
    (folder,) = written
    assert [side[side.index("--load") + 1] for side in sides] == [str(folder)] * 2


def _touch(folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / "prompts.jsonl").touch()


@pytest.mark.parametrize(
    ("new", "code", "said"),
    [
        ([1.00, 1.01, 0.99], 0, ""),
        ([1.10, 1.11, 1.09], 1, "slower than HEAD: reference"),
        ([1.10, 0.80, 1.40], 0, ""),  # nobody can tell
    ],
)
def test_exit_codes(repository, monkeypatch, capsys, new, code, said):
    monkeypatch.setattr(guard, "quiet_rounds", lambda args, job, sides, run: rounds(*((1.0, one) for one in new)))
    assert guard.main(["--old", "HEAD", "--job", "reference"]) == code
    out = capsys.readouterr().out
    assert "| reference | 2.000 s |" in out
    assert said in out


def test_a_busy_machine_judges_nothing(repository, monkeypatch, capsys):
    def busy(args, job, sides, run):
        raise BusyError("only 1 of 3 rounds were quiet")

    monkeypatch.setattr(guard, "quiet_rounds", busy)
    assert guard.main(["--old", "HEAD"]) == 3
    assert "only 1 of 3 rounds" in capsys.readouterr().err
    assert guard.main(["--old", "nowhere"]) == 2
