"""`mindrlhf report`: the file, a comparison's exit code, and the page in a headless browser where there is one."""

import pytest
from browser import Browser, find_browser
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


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    program = find_browser()
    if program is None:
        pytest.skip("no Chromium is installed (apt-get install chromium)")
    browser = Browser(program, tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


@pytest.fixture(scope="module")
def page(runs, tmp_path_factory):
    file = tmp_path_factory.mktemp("page") / "report.html"
    assert report(*runs, "--output", file, "--sample_steps", 30) == 0
    return file.as_uri()


def count(browser: Browser, selector: str) -> int:
    return browser.run(f"document.querySelectorAll('{selector}').length")


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (390, True)])
def test_the_page_opens_and_draws(browser, page, width, dark):
    browser.open(page, width, dark=dark, mobile=width < 600)
    assert browser.errors == []
    assert browser.run("window.hacked === undefined")
    assert browser.run("document.documentElement.scrollWidth <= innerWidth"), "nothing sticks out sideways"
    # Two runs: two curves a chart and an area chart each; every path has more than a point.
    assert count(browser, "#learning figure") == 12
    assert count(browser, "#cost path.area") == 2 * 5
    assert browser.run("[...document.querySelectorAll('path')].every((p) => /L/.test(p.getAttribute('d')))")
    assert browser.run("[...document.querySelectorAll('path')].every((p) => !/NaN|Infinity/.test(p.getAttribute('d')))")
    assert count(browser, "#runs .run") == 2
    ground = browser.run("getComputedStyle(document.body).backgroundColor")
    assert (ground == "rgb(255, 255, 255)") is not dark


def test_the_page_loads_nothing(browser, page):
    browser.open(page)
    assert browser.run("performance.getEntriesByType('resource').length") == 0
    blocked = "fetch('https://example.org/').then(() => 'reached', () => 'blocked')"
    assert browser.run(blocked) == "blocked"


def set_field(browser: Browser, section: str, name: str, value: str) -> None:
    field = f"document.querySelector('#{section} .filters').elements['{name}']"
    browser.run(f"{field}.value = '{value}'; {field}.dispatchEvent(new Event('input', {{bubbles: true}}))")


def test_rollouts_are_filtered(browser, page):
    browser.open(page)
    counted = "document.getElementById('count').textContent"
    assert browser.run(counted).startswith("240 answers to 60 prompts; samples of 30 of 30 steps")
    set_field(browser, "rollouts", "step", "3")
    assert browser.run(counted).startswith("8 answers to 2 prompts")
    set_field(browser, "rollouts", "low", "0.5")
    assert browser.run(counted).startswith("4 answers to 2 prompts")
    assert set(browser.run("[...document.querySelectorAll('.badge')].map((b) => b.textContent)")) == {"1"}
    set_field(browser, "rollouts", "text", "problem 31:")
    assert browser.run(counted).startswith("2 answers to 1 prompts")
    set_field(browser, "rollouts", "text", "")
    set_field(browser, "rollouts", "low", "")
    set_field(browser, "rollouts", "step", "")
    set_field(browser, "rollouts", "text", "onerror=")
    assert browser.run("document.querySelector('.answer pre').textContent").startswith("</script><script>")
    assert browser.run("window.hacked === undefined")
    set_field(browser, "rollouts", "text", "")
    before = count(browser, ".group")
    browser.run("document.getElementById('more').click()")
    assert count(browser, ".group") == 2 * before


def test_settings_show_what_differs(browser, page):
    browser.open(page)
    assert browser.run("[...document.querySelectorAll('tbody th')].map((cell) => cell.textContent)") == [
        "grpo.optimizer.lr",
        "grpo.seed",
    ]
    browser.run("document.querySelector('#settings input[type=checkbox]').click()")
    assert count(browser, "tbody tr") == 4
    set_field(browser, "settings", "text", "generations")
    assert count(browser, "tbody tr") == 1


def test_hovering_tells_the_values_of_a_step(browser, page):
    browser.open(page)
    at = "(() => { const box = document.querySelector('figure svg').getBoundingClientRect(); return box.right - 9; })()"
    event = f"new PointerEvent('pointermove', {{clientX: {at}}})"
    browser.run(f"document.querySelector('figure svg').dispatchEvent({event})")
    assert browser.run("document.querySelector('figure .legend').textContent").startswith("step 30")


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
        set_field(browser, "rollouts", "text", "problem 21:")
        set_field(browser, "rollouts", "step", "2")
        browser.run("document.querySelector('#rollouts .filters').elements.text.focus(), scrollTo(0, 600)")
        make_run(run, steps=7)

    live(monkeypatch, run, look)
    browser.wait("document.readyState === 'complete' && document.querySelector('.run dd').textContent === '7'")
    assert browser.run("document.getElementById('live').textContent") == ""
    assert browser.run("document.getElementById('count').textContent").startswith("4 answers to 1 prompts")
    assert browser.run("document.activeElement.value") == "problem 21:"
    browser.wait("Math.abs(scrollY - 600) < 50")
    assert browser.errors == []
