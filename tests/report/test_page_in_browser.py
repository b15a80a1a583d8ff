"""The page in a headless browser, where there is one: what it draws, and what a reader can do with it."""

import csv
from itertools import pairwise
from pathlib import Path

import pytest
from browser import Browser
from run_folders import make_run

from mindrlhf.commands.report import write_page
from mindrlhf.report import answers as answers_module
from mindrlhf.report.answers import AnswerReader
from mindrlhf.report.html import render
from mindrlhf.report.run import read_run

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    return make_run(folder / "base"), make_run(folder / "other", seed=1, reward=-0.2, lr=3e-6)


def written(folder: Path, *runs: Path, **options) -> Path:
    """A page of runs, named by their folders."""
    file = folder / "report.html"
    page = render([read_run(run, run.name, AnswerReader()) for run in runs], "report_data", **options)
    write_page(page, file, folder / "report_data")
    return file


@pytest.fixture(scope="module")
def two(runs, tmp_path_factory):
    return written(tmp_path_factory.mktemp("two"), *runs).as_uri()


@pytest.fixture(scope="module")
def one(runs, tmp_path_factory):
    return written(tmp_path_factory.mktemp("one"), runs[0]).as_uri()


def count(browser: Browser, selector: str) -> int:
    return browser.run(f"document.querySelectorAll('{selector}').length")


def texts(browser: Browser, selector: str) -> list[str]:
    return browser.run(f"[...document.querySelectorAll('{selector}')].map((one) => one.textContent)")


def counted(browser: Browser) -> str:
    return browser.run("document.getElementById('count').textContent")


def set_field(browser: Browser, section: str, name: str, value: str) -> None:
    field = f"document.querySelector('#{section} .filters').elements['{name}']"
    browser.run(f"{field}.value = '{value}'; {field}.dispatchEvent(new Event('input', {{bubbles: true}}))")
    browser.settle()


def click(browser: Browser, selector: str) -> None:
    browser.run(f"document.querySelector('{selector}').click()")
    browser.settle()


def press(browser: Browser, selector: str, key: str) -> None:
    event = f"new KeyboardEvent('keydown', {{key: '{key}', bubbles: true}})"
    browser.run(f"document.querySelector('{selector}').dispatchEvent({event})")
    browser.settle()


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (500, True), (320, False)])
def test_the_page_opens_and_draws(browser, two, width, dark):
    browser.open(two, width, dark=dark, mobile=width < 600)
    assert browser.errors == []
    assert browser.run("window.hacked === undefined")
    assert browser.run("document.documentElement.scrollWidth <= innerWidth"), "nothing sticks out sideways"
    # Two runs: two curves a chart, and an area chart each, of phases, rewards and lengths.
    assert count(browser, "#learning > .charts figure") == 16
    assert count(browser, "#cost path.area") == 2 * 5
    paths = "[...document.querySelectorAll('path')].map((one) => one.getAttribute('d'))"
    assert browser.run(f"{paths}.every((d) => /L/.test(d) && !/NaN|Infinity/.test(d))")
    assert texts(browser, "#runs h2") == ["base", "other"]
    ground = browser.run("getComputedStyle(document.body).backgroundColor")
    assert (ground == "rgb(255, 255, 255)") is not dark


def test_the_page_loads_nothing(browser, two):
    browser.open(two)
    assert browser.run("performance.getEntriesByType('resource').length") == 0
    blocked = "fetch('https://example.org/').then(() => 'reached', () => 'blocked')"
    assert browser.run(blocked) == "blocked"


def test_how_a_run_was_started(browser, one):
    browser.open(one)
    assert "2026-05-01 10:00 UTC" in texts(browser, ".run > p")[0]
    assert texts(browser, ".command") == ["train seed=0"]


def test_axes(browser, one):
    """Shares from 0 to 1, or to 0.1; room above a curve; charts that are 0 throughout are folded."""
    browser.open(one)
    ticks = """(() => Object.fromEntries([...document.querySelectorAll('#learning figure')].map((one) =>
        [one.querySelector('figcaption span').firstChild.textContent,
         [...one.querySelectorAll('text[text-anchor=end]')].map((text) => Number(text.textContent))])))()"""
    found = browser.run(ticks)
    assert (found["Groups that all score the same"][0], found["Groups that all score the same"][-1]) == (0, 1)
    assert found["Clip fraction"][-1] == 0.1
    highest = """(() => { const one = document.querySelector('#learning figure');
        return one.querySelector('.raw').getBBox().y; })()"""
    assert browser.run(highest) > 10, "below the picture's edge"
    assert texts(browser, ".folded summary") == ["0 throughout, or rounding alone: Failed calls of tools"]
    assert browser.run("document.querySelector('.folded').open") is False


def test_answers_are_collapsed_and_wide_spreads_come_first(browser, one):
    browser.open(one)
    assert counted(browser) == "280 answers to 61 prompts in 30 steps."
    spreads = [float(text.split("±")[1]) for text in texts(browser, ".cell .facts span") if "±" in text]
    assert spreads == sorted(spreads, reverse=True)
    assert spreads[0] == 0.5
    set_field(browser, "rollouts", "prompt", "7")
    set_field(browser, "rollouts", "step", "30")
    assert texts(browser, ".answer .times") == ["3 ×", "1 ×"]
    assert texts(browser, ".answer .badge") == ["1", "0"]
    assert browser.run("document.querySelector('.strip .high').style.flexGrow") == "3"


def test_answers_are_filtered_and_searched(browser, one):
    browser.open(one)
    set_field(browser, "rollouts", "step", "4")
    assert counted(browser) == "8 answers to 2 prompts in 1 step."
    set_field(browser, "rollouts", "low", "0.5")
    assert set(texts(browser, ".badge")) == {"1"}
    set_field(browser, "rollouts", "text", "PROBLEM 41:")
    assert counted(browser).startswith("1 answer to 1 prompt")
    for name in ("low", "step", "text"):
        set_field(browser, "rollouts", name, "")
    set_field(browser, "rollouts", "text", "onerror=")
    assert counted(browser) == "1 answer to 1 prompt in 1 step."
    assert texts(browser, "mark") == ["onerror="]
    assert browser.run("document.querySelector('.answer pre').textContent").startswith("</script><script>")
    assert browser.run("window.hacked === undefined")
    set_field(browser, "rollouts", "text", "nobody wrote this")
    assert counted(browser) == "No such answers."
    set_field(browser, "rollouts", "text", "")
    before = count(browser, ".group")
    click(browser, "#more")
    assert count(browser, ".group") == 2 * before


def test_the_same_prompt_across_steps(browser, one):
    browser.open(one + "#prompt=7")
    assert counted(browser) == "40 answers to 1 prompt in 10 steps."
    assert texts(browser, ".cell .facts a") == [f"step {step}" for step in range(3, 31, 3)]
    assert count(browser, ".group > figure circle") == 10, "its reward by step"
    click(browser, ".cell:nth-child(2) .facts a")
    assert browser.run("location.hash") == "#step=6&prompt=7"
    assert counted(browser) == "4 answers to 1 prompt in 1 step."
    assert texts(browser, ".ask a") == ["in 10 steps"]
    click(browser, ".ask a")
    assert count(browser, ".cell") == 10


def test_a_link_leads_to_a_step_and_prompt(browser, two):
    browser.open(two + "#run=1&step=5&prompt=51")
    assert counted(browser) == "4 answers to 1 prompt in 1 step."
    assert texts(browser, ".ask b") == ["prompt 51"]
    assert browser.run("document.getElementById('chosen').value") == "5"
    assert browser.run("document.getElementById('rollouts').getBoundingClientRect().top < innerHeight / 2")


def test_two_runs_side_by_side_on_one_prompt(browser, two):
    browser.open(two)
    assert texts(browser, ".group:first-child .column h3") == ["base", "other"]
    assert texts(browser, ".group:first-child .cell .facts a") == ["step 30", "step 30"]
    set_field(browser, "rollouts", "order", "difference")
    assert count(browser, ".group:first-child .column") == 2
    set_field(browser, "rollouts", "run", "1")
    assert count(browser, ".column h3") == 0
    assert counted(browser).startswith("280 answers")


def test_an_answer_token_by_token(browser, one):
    browser.open(one + "#step=30&prompt=7")
    click(browser, ".answer button")
    assert texts(browser, ".token") == [" 7", "2", "<|im_end|>"]
    assert texts(browser, ".token.context") == ["<|im_end|>"], "not sampled"
    colours = "[...document.querySelectorAll('.token')].map((one) => one.style.background)"
    assert [bool(one) for one in browser.run(colours)] == [True, True, False]
    press(browser, ".stream", "ArrowRight")
    press(browser, ".stream", "ArrowRight")
    told = browser.run("document.querySelector('.told').textContent")
    assert told == 'token 2 of 3 "2" · advantage -0.5 · ratio 1.3 · entropy 0.7 · clipped yes'
    browser.run("""(() => { const select = document.querySelector('.tokens select');
        select.value = 'clipped'; select.dispatchEvent(new Event('input', {bubbles: true})); })()""")
    assert [bool(one) for one in browser.run(colours)] == [False, True, False]
    click(browser, ".answer button")
    assert texts(browser, ".answer pre")[0] == " 72<|im_end|>"


def test_a_step_is_chosen_in_a_chart(browser, two):
    """By pointer and by keyboard; the waterfall and the answers follow."""
    browser.open(two)
    names = "[...document.querySelectorAll('#step figure:first-child rect')]"
    before = browser.run(f"{names}.map((bar) => bar.getAttribute('width'))")
    at = (
        "(() => { const box = document.querySelector('figure svg').getBoundingClientRect(); return box.right - 11; })()"
    )
    browser.run(
        f"document.querySelector('figure svg').dispatchEvent(new PointerEvent('pointermove', {{clientX: {at}}}))"
    )
    assert texts(browser, "figure .legend")[0].startswith("step 30")
    press(browser, "figure svg", "ArrowLeft")
    assert texts(browser, "figure .legend")[0].startswith("step 29")
    press(browser, "figure svg", "Enter")
    assert browser.run("document.querySelector('#rollouts .filters').elements.step.value") == "29"
    assert "step 29" in texts(browser, "#step small")[0]
    assert browser.run(f"{names}.map((bar) => bar.getAttribute('width'))") != before
    assert counted(browser) == "16 answers to 2 prompts in 2 steps."
    assert all(text.startswith("step 29") for text in texts(browser, "#learning > .charts .legend"))
    press(browser, "figure svg", "Escape")
    assert browser.run("document.getElementById('chosen').value") == ""


def test_the_waterfall_adds_up_to_a_step(browser, one):
    browser.open(one + "#step=1")
    bars = """[...document.querySelectorAll('#step figure:first-child rect')].map((bar) =>
        [Number(bar.getAttribute('x')), Number(bar.getAttribute('width'))])"""
    found = browser.run(bars)
    labels = texts(browser, "#step figure:first-child text:not(.value)")[: len(found)]
    assert labels == ["gen", "reward", "ref", "train", "compile", "other"]
    for (start, size), (following, _) in pairwise(found):
        assert abs(start + size - following) < 1.01, "each begins where the one before it ends"
    assert texts(browser, "#step figure:last-child text:not(.value)")[:2] == ["reference", "kv cache"], "largest first"


def test_a_chart_is_saved(browser, two, tmp_path):
    browser.open(two)
    button = "document.querySelectorAll('#learning figure .save button')"
    picture = browser.download(tmp_path, f"{button}[0].click()")
    assert picture.name == "reward.png"
    assert picture.read_bytes().startswith(PNG)
    assert picture.stat().st_size > 5000
    drawn = browser.download(tmp_path, f"{button}[1].click()")
    assert drawn.name == "reward.svg"
    assert drawn.read_text().startswith("<svg xmlns=")
    rows = list(csv.reader(browser.download(tmp_path, f"{button}[2].click()").open()))
    assert rows[0] == ["step", "base", "other"]
    assert len(rows) == 31
    assert float(rows[30][1]) == pytest.approx(float(rows[30][2]) + 0.2, abs=0.2)
    assert browser.errors == []


def test_answers_in_a_folder_are_loaded_when_needed(browser, runs, tmp_path, monkeypatch):
    monkeypatch.setattr(answers_module, "CHUNK_BYTES", 3000)
    page = written(tmp_path, runs[0], most_inside=0)
    files = sorted((tmp_path / "report_data").iterdir())
    assert len(files) > 8
    browser.open(page.as_uri() + "#step=30&prompt=7")
    assert browser.errors == []
    assert texts(browser, ".answer .times") == ["3 ×", "1 ×"]
    assert count(browser, "script[src]") == 1
    set_field(browser, "rollouts", "prompt", "")
    set_field(browser, "rollouts", "step", "")
    set_field(browser, "rollouts", "text", "onerror=")
    assert counted(browser) == "1 answer to 1 prompt in 1 step.", "the search has loaded all of them"
    assert count(browser, "script[src]") == len(files)
    written(tmp_path, runs[0])
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"], "a page that needs no folder removes it"


def test_a_page_without_its_folder_says_so(browser, runs, tmp_path):
    page = written(tmp_path, runs[0], most_inside=0)
    for path in (tmp_path / "report_data").iterdir():
        path.unlink()
    browser.open(page.as_uri())
    assert "Files of the folder report_data are missing" in counted(browser)


def test_settings_show_what_differs(browser, two):
    browser.open(two)
    assert texts(browser, "tbody th") == ["grpo.optimizer.lr", "grpo.seed"]
    click(browser, "#settings input[type=checkbox]")
    assert count(browser, "tbody tr") == 4
    set_field(browser, "settings", "text", "generations")
    assert count(browser, "tbody tr") == 1


def test_a_run_of_fine_tuning_is_not_asked_for_its_answers(browser, tmp_path):
    """It has no setting that would keep some."""
    (tmp_path / "tuned").mkdir()
    (tmp_path / "tuned" / "metrics.jsonl").write_text('{"step": 1, "train/loss": 2.5}\n')
    (tmp_path / "tuned" / "settings.json").write_text('{"sft": {"seed": 0}}\n')
    browser.open(written(tmp_path, tmp_path / "tuned").as_uri())
    assert counted(browser) == "Fine-tuning draws no answers."
    assert "Loss on demonstrations" in browser.run("document.body.innerText")
    assert not browser.errors
