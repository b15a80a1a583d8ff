"""The claims: verdicts and table from stand-in results, what is run and what is not; a claim for real (slow)."""

import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest
from shell_scripts import run_script
from workers import ROOT

from mindrlhf.configs.loading import load_grpo_config
from mindrlhf.configs.validate import check_algorithm, check_comparison, check_lora
from mindrlhf.errors import UserError
from mindrlhf.files.folder_lock import lock_folders

sys.path.insert(0, str(ROOT / "benchmarks" / "claims"))

import run as claims_command
from claim import Claim, Claims, read_claims
from lab import Children, Lab, Progress
from measures import answer_figures, read_figures, window_mean
from table import made_by, markdown, rows
from verdict import DOES_NOT, HOLDS, MOST_SEEDS, T_QUANTILES, UNSEEN, Difference, paired_difference, verdict


def claim(says: str = "more", least: float = 0.1, **changes) -> Claim:
    values = {"name": "one", "text": "B has more", "source": "somebody", "first": "a", "second": "b"}
    values |= {"metric": "score", "first_step": 2, "last_step": 3, "says": says, "least": least}
    return Claim(**(values | changes))


@pytest.mark.parametrize("freedom", [1, 2, 4, 9, len(T_QUANTILES)])
def test_quantiles_are_those_of_students_t(freedom):
    """The density, integrated numerically from 0 to the quantile, is 0.475."""
    norm = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)) / math.sqrt(freedom * math.pi)
    points = np.linspace(0.0, T_QUANTILES[freedom - 1], 200_001)
    density = norm * (1 + points**2 / freedom) ** (-(freedom + 1) / 2)
    area = np.sum((density[1:] + density[:-1]) / 2) * points[1]
    assert area == pytest.approx(0.475, abs=2e-6)
    assert len(T_QUANTILES) + 1 == MOST_SEEDS


def test_an_interval_is_that_of_the_differences_by_seed():
    found = paired_difference([0.5, 0.1, 0.9, 0.3, 0.2], [0.7, 0.2, 1.2, 0.5, 0.4])
    differences = np.array([0.2, 0.1, 0.3, 0.2, 0.2])
    half = 2.7764 * differences.std(ddof=1) / 5**0.5
    assert (found.mean, found.low, found.high) == pytest.approx((0.2, 0.2 - half, 0.2 + half))


@pytest.mark.parametrize(
    ("says", "low", "high", "expected"),
    [
        ("more", 0.02, 0.30, HOLDS),  # mean 0.16
        ("more", 0.02, 0.14, UNSEEN),  # above 0, but its mean is less than what matters
        ("more", -0.05, 0.30, UNSEEN),
        ("more", -0.20, 0.05, DOES_NOT),
        ("more", 0.02, 0.08, DOES_NOT),  # real, and too small to matter
        ("less", -0.30, -0.02, HOLDS),
        ("less", -0.05, 0.20, DOES_NOT),
        ("less", -0.30, 0.05, UNSEEN),
        ("same", -0.09, 0.05, HOLDS),
        ("same", 0.01, 0.09, HOLDS),
        ("same", -0.12, 0.05, UNSEEN),
        ("same", 0.04, 0.20, DOES_NOT),
        ("same", 0.01, 0.12, UNSEEN),
    ],
)
def test_verdicts_follow_the_interval_and_the_least_difference(says, low, high, expected):
    assert verdict(claim(says), Difference((low + high) / 2, low, high)) == expected


def lab_of(folder: Path, seeds: int = 3, **changes) -> Lab:
    """A lab of three arms, of which the last has the settings of the first in another order."""
    arms = {"a": ("x.y=1", "x.z=2"), "b": ("x.y=2",), "c": ("x.z=2", "x.y=1")}
    two = [claim(), claim(name="two", first="b", second="c", says="less")]
    return Lab(Claims(start={"problems": []}, common=("x.y=0",), arms=arms, claims=two), folder, seeds, **changes)


def store(lab: Lab, arm: str, seed: int, scores: list[float], code: str = "c0de") -> None:
    """Stand-in for a finished run: a score for each step from 1 on."""
    run = lab.run(arm, seed)
    lab.result(run).parent.mkdir(parents=True, exist_ok=True)
    figures = {"score": {str(step): score for step, score in enumerate(scores, 1)}}
    about = {"settings": run.settings, "start": run.start, "code": code}
    lab.result(run).write_text(json.dumps({**about, "figures": figures}))


def test_arms_of_equal_settings_are_run_once_and_finished_runs_not_again(tmp_path):
    lab = lab_of(tmp_path)
    assert lab.run("a", 1) == lab.run("c", 1)
    assert lab.run("a", 1).settings == {"seed": "1", "x.y": "1", "x.z": "2"}
    assert len({lab.run(arm, seed).key for arm in "ab" for seed in range(3)}) == 6
    assert lab_of(tmp_path, steps=2).run("a", 1).key != lab.run("a", 1).key
    names = [lab.names(run) for run in lab.missing(lab.claims.claims)]
    assert names == [f"{arms}, seed {seed}" for arms in ("a, c", "b") for seed in range(3)]
    store(lab, "c", 0, [1.0])
    assert [lab.names(run) for run in lab.missing(lab.claims.claims)] == names[1:]


def test_a_table_has_means_interval_and_verdict_of_stored_runs(tmp_path):
    lab = lab_of(tmp_path)
    for seed in range(3):
        store(lab, "a", seed, [9.0, 1.0 + seed, 2.0 + seed, 9.0])  # 1.5, 2.5, 3.5 in the window
        if seed < 2:
            store(lab, "b", seed, [0.0, 2.0 + seed, 3.0 + seed])
    assert [row[1:4] for row in rows(lab, lab.claims.claims)] == [
        ("2 of 3 seeds", "", "≥ +0.1"),
        ("2 of 3 seeds", "", "≤ -0.1"),
    ]
    store(lab, "b", 2, [0.0, 4.0, 5.5])
    more, less = rows(lab, lab.claims.claims)
    found = paired_difference([1.5, 2.5, 3.5], [2.5, 3.5, 4.75])
    interval = f"{found.mean:+.3f} ({found.low:+.3f} to {found.high:+.3f})"
    assert more[:4] == ("B has more (somebody)", f"**{HOLDS}**", interval, "≥ +0.1")
    assert more[4:] == ("`a` 2.500", "`b` 3.583", "`score`, 2 to 3", "`bash scripts/claims.sh one`")
    assert less[4:6] == ("`b` 3.583", "`c` 2.500")
    assert less[1] == f"**{HOLDS}**"
    assert {line.count(" | ") for line in markdown(lab, lab.claims.claims).splitlines()} == {len(more) - 1}
    assert made_by(lab, lab.claims.claims) == made_by(lab_of(tmp_path), lab.claims.claims)
    before = made_by(lab, lab.claims.claims)
    assert before.startswith("6 runs; ")
    assert "several" not in before
    store(lab, "b", 2, [0.0, 4.0, 5.5 + 1e-12], code="another")
    after = made_by(lab, lab.claims.claims)
    assert "another, c0de (several: " in after
    assert after.split()[-1] != before.split()[-1]


def test_fewer_steps_move_the_window(tmp_path):
    lab = lab_of(tmp_path, seeds=2, steps=2)
    for arm in "ab":
        for seed in range(2):
            store(lab, arm, seed, [5.0, 1.0])
    assert rows(lab, [claim()])[0][4:7] == ("`a` 1.000", "`b` 1.000", "`score`, 2 to 2")


def answer(prompt: int, right: int, length: int, advantage: float) -> dict:
    return {"prompt_id": prompt, "rewards": {"r": right}, "response_length": length, "advantage": advantage}


def test_figures_of_answers():
    even = [answer(1, 1, 4, 0.5), answer(1, 1, 6, 0.5), answer(1, 0, 9, -0.5), answer(1, 0, 7, -0.5)]
    odd = [answer(2, 1, 5, 1.5), answer(2, 0, 8, -0.5), answer(2, 0, 8, -0.5), answer(2, 0, 8, -0.5)]
    found = answer_figures(even + odd, "r")
    assert found == {"answers/right_length": 5.0, "answers/wrong_length": 8.0, "answers/one_sided": 0.6}
    assert answer_figures([answer(1, 1, 4, 0.0)], "r") == {"answers/right_length": 4.0}


def test_figures_of_a_run_leave_out_what_depends_on_the_machine(tmp_path):
    steps = [{"step": 0, "val": 0.5}, {"step": 1, "val": 0.25, "timing_s/gen": 3.0, "perf/mfu": 1.0, "none": None}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in steps))
    (tmp_path / "rollouts").mkdir()
    (tmp_path / "rollouts" / "step_000001.jsonl").write_text(json.dumps(answer(1, 0, 3, 1.0)) + "\n")
    figures = read_figures(tmp_path, "r")
    assert figures.pop("answers/wrong_length") == {1: 3.0}
    assert figures.pop("answers/one_sided") == {1: 1.0}
    assert figures == {"val": {0: 0.5, 1: 0.25}}
    assert window_mean(figures, "val", 0, 1) == 0.375
    assert window_mean(figures, "val", 2, 9) is None


def test_every_arm_has_settings_that_a_run_accepts():
    records = read_claims()
    assert len(records.claims) >= 10
    for name, settings in records.arms.items():
        config = load_grpo_config(overrides=[*records.common, *settings])
        check_algorithm(config.algorithm)
        check_comparison(config)
        check_lora(config.lora)
        assert name in {arm for one in records.claims for arm in (one.first, one.second)}
    for one in records.claims:
        first, second = (
            load_grpo_config(overrides=[*records.common, *records.arms[arm]]) for arm in (one.first, one.second)
        )
        assert first.trainer.total_steps == second.trainer.total_steps >= one.last_step


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"arms": ["a", "d"]}, "claim one: there is no arm d; the arms are a, b."),
        ({"says": "better"}, "claim one: says is better, and should be more, less or same."),
        ({"steps": [3, 2]}, "claim one: steps is [3, 2], and should be the first and the last step of a window."),
    ],
)
def test_a_record_that_cannot_be_tried_is_named(tmp_path, change, message):
    values = {"text": "B has more", "source": "somebody", "arms": ["a", "b"], "metric": "score", "steps": [1, 2]}
    values |= {"says": "more", "least": 0.1}
    path = tmp_path / "claims.yaml"
    content = {"start": {}, "common": [], "arms": {"a": ["x=1", ["y=2"]], "b": []}, "claims": {"one": values}}
    path.write_text(json.dumps(content))
    assert read_claims(path).arms == {"a": ("x=1", "y=2"), "b": ()}
    path.write_text(json.dumps(content | {"claims": {"one": values | change}}))
    with pytest.raises(UserError) as error:
        read_claims(path)
    assert str(error.value) == f"{path}: {message}"


def test_an_unknown_claim_and_a_wrong_option_are_one_sentence(capsys, tmp_path):
    assert claims_command.main(["clip_hihger", "--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith("claims: there is no claim clip_hihger; the claims are clip_higher, ")
    with pytest.raises(SystemExit):
        claims_command.main(["--seeds", "1"])
    assert capsys.readouterr().err.endswith(f"error: --seeds 1: give 2 to {MOST_SEEDS}\n")
    assert list(tmp_path.iterdir()) == []


def test_runs_that_fail_are_named_once_the_others_have_been_tried(tmp_path):
    lab = lab_of(tmp_path, seeds=2)  # whose settings no run knows
    lab.start.folder.mkdir()
    (lab.start.folder / "start.json").write_text("{}")
    said = []
    with pytest.raises(UserError) as error:
        lab.make(lab.claims.claims, 1, said.append)
    yaml = f"{lab.start.folder / 'model.yaml'}: there is no such file; give the path of a YAML file."
    runs = (f"{names}, seed {seed}" for names in ("a, c", "b") for seed in range(2))
    assert str(error.value) == " ".join(f"{run}: {yaml}" for run in runs)
    assert said == []


def test_two_labs_do_not_share_a_folder(tmp_path):
    lab = lab_of(tmp_path)
    with lock_folders({"--out": tmp_path}), pytest.raises(UserError) as error:
        lab.make(lab.claims.claims, 1)
    assert "another run is writing there" in str(error.value)
    assert str(error.value).endswith("give --out another folder.")


def test_processes_end_with_the_lab():
    children = Children()
    child = children.start([sys.executable, "-c", "import time; time.sleep(600)"], None)
    children.end()
    assert child.poll() is not None
    with pytest.raises(RuntimeError):
        children.start([sys.executable, "-c", ""], None)


def test_progress_names_the_run_and_the_time_left():
    said = []
    times = iter([100.0, 110.0, 130.0])
    progress = Progress(4, said.append, lambda: next(times))
    progress.add("a, seed 0", 9.9)
    progress.add("a, seed 1", 20.04)
    assert said == ["1/4  a, seed 0: 9.9 s; 0:00:30 left", "2/4  a, seed 1: 20.0 s; 0:00:30 left"]


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_claim_is_tried_for_real_and_goes_on_where_it_was(tmp_path):
    few = ("length_bias", "--seeds", "2", "--steps", "2", "--out", str(tmp_path / "here"))
    done = run_script("claims.sh", tmp_path, *few)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line.split("  ")[0] for line in done.stdout.splitlines()[1:5]] == ["1/4", "2/4", "3/4", "4/4"]
    table = (tmp_path / "here" / "table_length_bias.md").read_text()
    assert "`answers/wrong_length`, 2 to 2" in table
    assert len(list((tmp_path / "here" / "runs").iterdir())) == 4
    again = run_script("claims.sh", tmp_path, *few)
    assert "/4" not in again.stdout
    assert again.stdout == done.stdout[done.stdout.index("| claim |") :]
    missing = sorted((tmp_path / "here" / "runs").iterdir())[1]
    figures = json.loads(missing.read_text())["figures"]
    missing.unlink()
    last = run_script("claims.sh", tmp_path, *few)
    assert last.stdout.startswith("1/1  ")
    assert last.stdout.endswith(done.stdout[done.stdout.index("| claim |") :])
    assert json.loads(missing.read_text())["figures"] == figures
