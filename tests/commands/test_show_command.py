"""`mindrlhf show`: the rollouts of a step in a terminal."""

import pytest
from run_folders import make_run, rollout_rows

from mindrlhf import cli
from mindrlhf.records.formats import write_text


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("runs") / "run", steps=3)


def show(capsys, *arguments) -> str:
    assert cli.main(["show", *map(str, arguments)]) == 0
    return capsys.readouterr().out


def test_prompts_answers_and_rewards_side_by_side(run, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    text = show(capsys, run, "--step", 2, "--prompt", 21)
    assert "step 2 · prompt 21 · expected 72" in text
    assert "Problem 20" not in text
    line = next(line for line in text.splitlines() if "reward" in line)
    assert [cell.strip() for cell in line.strip("┃").split("┃")] == ["reward 1", *["reward 0"] * 3], "best first"
    answers = next(line for line in text.splitlines() if "####" in line)
    assert answers.count("####") == 4, "side by side"
    assert "cut off" in text
    assert show(capsys, run).count("step 3 · ") == 3, "the last step"


def test_a_narrow_terminal_shows_fewer_beside_each_other(run, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    text = show(capsys, run, "--step", 2, "--prompts", 1)
    assert text.count("reward 0") == 3
    assert max(map(len, text.splitlines())) <= 40
    assert "2 more answers: --samples 4" in show(capsys, run, "--step", 2, "--prompts", 1, "--samples", 2)


def test_texts_are_shown_as_they_are(run, capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("COLUMNS", "160")
    rows = rollout_rows(1, prompts=1, samples=1)
    rows[0] |= {"prompt": "[bold]not markup[/bold]", "completion": "\x1b[2Jgone" + "x" * 3000, "reward": float("nan")}
    write_text(tmp_path / "rollouts", 1, rows)
    text = show(capsys, tmp_path)
    assert "[bold]not markup[/bold]" in text
    assert "\x1b[2J" not in text
    assert "\\u001b[2Jgone" in text
    assert "unscored" in text
    assert text.count("x") < 1500
    assert show(capsys, tmp_path, "--full").count("x") >= 3000


def test_no_text_of_a_row_steers_the_terminal(capsys, tmp_path):
    nasty = "\x1b[2J\ud800\u202e"
    rows = rollout_rows(1, prompts=1, samples=2)
    for row in rows:
        row |= {"ground_truth": nasty, "prompt": nasty, "completion": nasty, "rewards": {nasty: 1.0, "b": None}}
    write_text(tmp_path / "rollouts", 1, rows)
    text = show(capsys, tmp_path)
    assert not {"\x1b", "\ud800", "\u202e"} & set(text)
    assert "expected \\u001b[2J" in text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--step", 9), "has no such step; it has steps 1 to 3"),
        (("--step", 2, "--prompt", 5), "--prompt 5: is not in step 2, which has 20, 21"),
        (("--prompts", 0), "--prompts and --samples should be 1 or more"),
    ],
)
def test_what_is_not_there(run, capsys, options, message):
    assert cli.main(["show", str(run), *map(str, options)]) == 2
    assert message in capsys.readouterr().err


def test_no_rollouts(tmp_path, capsys):
    assert cli.main(["show", str(tmp_path)]) == 2
    assert "train with trainer.save_rollouts=True" in capsys.readouterr().err


def test_the_parts_of_a_conversation_are_set_apart(capsys, monkeypatch, tmp_path):
    rows = rollout_rows(1, prompts=1, samples=1)
    rows[0]["turns"] = [[True, "Let me count."], [False, "[b]it is 4"], [True, "Four" + "x" * 3000]]
    write_text(tmp_path / "rollouts", 1, rows)
    text = show(capsys, tmp_path)
    assert "Let me count.[b]it is" in text
    assert "4Fourxxx" in text
    assert text.count("x") < 500
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert "\x1b[2;3m[b]it is" in show(capsys, tmp_path, "--full")
