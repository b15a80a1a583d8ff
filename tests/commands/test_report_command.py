"""`mindrlhf report`: the file, a comparison's exit code, and the page in a headless browser where there is one."""

import threading

import pytest
from browser import Browser, find_browser
from run_folders import make_run

from mindrlhf import cli
from mindrlhf.metrics.report.run import read_run
from mindrlhf.metrics.report.server import ReportServer


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
        (("--compare", "--serve"), "--compare and --serve do different things"),
        (("--host", "example.org"), "--host example.org: should be localhost or an IPv4 address"),
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
    assert count(browser, "#learning figure") == 11
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


def test_live_the_page_follows_the_run(browser, tmp_path):
    run = make_run(tmp_path / "live", steps=3, rollouts=False)
    with ReportServer("127.0.0.1", 0, lambda: [read_run(run, "live", 1, 1, begun=False)], 0.2) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            browser.open(server.address)
            assert browser.run("document.querySelector('.run dd').textContent") == "3"
            make_run(run, steps=7, rollouts=False)
            browser.wait("document.querySelector('.run dd').textContent === '7'")
            assert browser.errors == []
        finally:
            browser.run("location.href = 'about:blank'")
            server.shutdown()
            thread.join()
