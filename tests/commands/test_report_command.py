"""`mindrlhf report`: the file, a comparison's exit code, and a live page in a headless browser where there is one."""

import pytest
from run_folders import make_run

from mindrlhf import cli
from mindrlhf.commands import report as report_command


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    return make_run(folder / "base"), make_run(folder / "other", seed=1, reward=-0.2, lr=3e-6)


def report(*arguments) -> int:
    return cli.main(["report", *map(str, arguments)])


def test_the_file_is_written_whole_beside_the_run(runs, tmp_path, capsys):
    assert report(*runs) == 0
    assert capsys.readouterr().out == f"{runs[0] / 'report.html'}\n"
    assert report(runs[0] / "metrics.jsonl", "--output", tmp_path / "new" / "page.html") == 0
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["page.html"]


def test_compare_answers_with_its_exit_code(runs, capsys):
    assert report(runs[0], runs[0], "--compare") == 0
    assert "the runs agree" in capsys.readouterr().out
    assert report(*runs, "--compare") == 1
    text = capsys.readouterr().out
    assert "critic/rewards/mean: mean absolute error" in text
    assert "limit 4%" in text
    assert "the runs DIFFER" in text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--labels", "one"), "--labels has 1 names for 2 runs"),
        (("--compare", "--live"), "--compare and --live do different things"),
        (("--refresh", "0"), "--refresh between 0.5 and 3600 seconds"),
    ],
)
def test_bad_flags(runs, capsys, options, message):
    assert report(*runs, *options) == 2
    assert message in capsys.readouterr().err


def test_compare_takes_two(runs, capsys):
    assert report(runs[0], "--compare") == 2
    assert "--compare takes two runs, and 1 are given" in capsys.readouterr().err


def live(monkeypatch, run, *looks) -> None:
    """`report --live` on a run, with a call of each of `looks` in place of a pause, and Ctrl-C in the next one."""
    todo = iter(looks)

    def pause(_: float) -> None:
        look = next(todo, None)
        if look is None:
            raise KeyboardInterrupt
        look()

    monkeypatch.setattr(report_command, "sleep", pause)
    assert report(run, "--live", "--refresh", 0.5) == 0


def test_live_rewrites_the_file_until_it_is_stopped(tmp_path, monkeypatch, capsys):
    run = tmp_path / "live"
    run.mkdir()
    file, seen = run / "report.html", []

    def grow(steps: int) -> None:
        seen.append(file.read_text())
        make_run(run, steps=steps, rollouts=False)

    live(monkeypatch, run, lambda: grow(3), lambda: grow(7), lambda: seen.append(file.read_text()))
    assert capsys.readouterr().out == f"{file} (rewritten every 0.5 s; Ctrl-C ends it)\n"
    assert ['"steps":[]' in seen[0], '"steps":[1,2,3]' in seen[1], '"steps":[1,2,3,4,5,6,7]' in seen[2]] == [True] * 3
    assert all('"refresh_s":0.5' in page for page in seen)
    assert '"refresh_s":null' in file.read_text(), "a page that nobody rewrites does not reload itself"
    assert sorted(path.name for path in run.iterdir()) == ["metrics.jsonl", "report.html", "settings.json"]


def test_live_needs_a_folder(tmp_path, capsys):
    assert report(tmp_path / "absent", "--live") == 2
    assert "there is no such folder" in capsys.readouterr().err


def test_a_live_page_loads_itself_again_and_stays_where_it_was(browser, tmp_path, monkeypatch):
    run = make_run(tmp_path / "live", steps=3)

    def look() -> None:
        browser.open((run / "report.html").as_uri())
        assert browser.run("document.getElementById('live').textContent").startswith("live")
        for name, value in (("text", "problem 21:"), ("step", "2")):
            field = f"document.querySelector('#rollouts .filters').elements.{name}"
            browser.run(f"{field}.value = '{value}'; {field}.dispatchEvent(new Event('input', {{bubbles: true}}))")
        browser.settle()
        browser.run("document.querySelector('#rollouts .filters').elements.text.focus(), scrollTo(0, 600)")
        loads.append(browser.loads)
        make_run(run, steps=7)

    loads = []
    live(monkeypatch, run, look)
    while browser.run("document.querySelector('.run dd').textContent") != "7":
        browser.wait_for_load(loads[-1])
        loads.append(browser.loads)
    browser.settle()
    assert browser.run("document.getElementById('live').textContent") == ""
    assert browser.run("document.getElementById('count').textContent") == "4 answers to 1 prompt in 1 step."
    assert browser.run("document.activeElement.value") == "problem 21:"
    assert browser.run("Math.abs(scrollY - 600) < 50")
    assert browser.errors == []


def test_a_folder_of_runs_is_its_runs(tmp_path, capsys):
    """As the quick start's, whose runs are in sft/ and grpo/."""
    for name in ("grpo", "sft"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text('{"step": 1, "critic/rewards/mean": 0.5}\n')
    assert cli.main(["report", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'grpo' / 'report.html'}\n"
    (tmp_path / "empty").mkdir()
    assert cli.main(["report", str(tmp_path / "empty")]) == 2
