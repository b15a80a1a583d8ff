"""Findings, results and the report, without a device."""

import json

import numpy as np
import pytest

from mindrlhf.acceptance.catalogue import all_checks, matching
from mindrlhf.acceptance.checks import LEVELS, Finding, compared, difference
from mindrlhf.acceptance.facts import machine_facts
from mindrlhf.acceptance.kit import Result
from mindrlhf.acceptance.report import report_data, write_report
from mindrlhf.backend.cpu import CPU
from mindrlhf.errors import UserError

pytestmark = pytest.mark.fast


def test_an_error_is_of_the_whole_array_or_of_one_number():
    answer = np.zeros(10_000)
    answer[:] = 2.0
    assert difference(answer * 1.01, answer) == pytest.approx(0.01)
    one = answer.copy()
    one[7] = 3.0
    assert difference(one, answer) == pytest.approx(0.5 / 4)
    assert difference(np.array([0.25]), np.zeros(1)) == 0.25
    assert difference(np.zeros(3), np.zeros(4)) == np.inf
    assert difference(np.zeros((0, 2)), np.zeros((0, 2))) == 0


def test_a_number_that_is_none_fails_and_is_counted():
    finding = compared("output", np.array([1.0, np.nan, np.inf]), np.ones(3), 0.5)
    assert not finding.passed
    assert finding.note == "2 of 3 numbers are not finite"
    wrong = compared("output", np.ones(2), np.ones(3), 0.5)
    assert not wrong.passed
    assert wrong.note == "the shape is [2], and should be [3]"


def test_a_check_that_found_nothing_has_not_passed():
    assert not Result("x", "layer", 1).passed
    assert Result("x", "layer", 1, [Finding("output", 0.0, 0.0)]).passed


def test_the_worst_finding_is_the_one_with_the_largest_share_of_its_tolerance():
    small, large = Finding("a", 1e-3, 1e-2), Finding("b", 1e-5, 1e-6)
    assert Result("x", "layer", 1, [small, large]).worst is large
    assert Result("x", "layer", 1, [small, large, Finding("c", float("nan"), 1.0)]).worst.part == "c"


def test_levels_include_those_before_them():
    found = {level: all_checks(CPU, level, 2) for level in LEVELS}
    counts = [len(checks) for checks in found.values()]
    assert counts == sorted(set(counts))
    for number, (level, checks) in enumerate(found.items(), start=1):
        assert [one.level for one in checks] == sorted((one.level for one in checks), key=LEVELS.index)
        assert {one.level for one in checks} == set(LEVELS[:number]), level
    names = [one.name for one in found["run"]]
    assert len(set(names)) == len(names)


def test_checks_are_chosen_by_words_of_their_names():
    checks = all_checks(CPU, "layer", 1)
    found = matching(checks, ["rms_norm", "swiglu"])
    assert {one.name.split()[0] for one in found} == {"rms_norm", "swiglu"}
    with pytest.raises(UserError, match="--only: no check of this level has 'rmsnorm' in its name"):
        matching(checks, ["rmsnorm"])


def failed_result() -> Result:
    findings = [
        Finding("output", float("nan"), 1e-5, "<script>alert(1)</script>"),
        Finding("gradient of x", 0.5, 1e-5),
        Finding("gradient of weight", 1e-7, 1e-5),
    ]
    return Result("rms_norm float32", "operators", 1, findings, 1.5, 0.25)


def test_the_report_is_json_and_one_page(tmp_path):
    good = Result("linear float32", "operators", 1, [Finding("output", 1e-7, 1e-5)], 0.5)
    results = [good, failed_result()]
    data = report_data({"device": "CPU", "CANN": "8.5"}, results, 3.0, "mindrlhf acceptance")
    path, page = write_report(tmp_path, data)
    stored = json.loads(path.read_text())
    assert stored["passed"] is False
    assert stored["first_failed"] == "rms_norm float32"
    assert stored["levels"] == [{"level": "operators", "checks": 2, "failed": 1, "findings": 4, "seconds": 2.0}]
    assert stored["results"][1]["findings"][0]["error"] is None
    text = page.read_text()
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in text
    assert "<script>alert" not in text
    assert "no number" in text
    assert "src=" not in text.replace("script-src", "").replace("img-src", "")


def test_a_report_without_failures_says_so(tmp_path):
    good = Result("linear float32", "operators", 1, [Finding("output", 1e-7, 1e-5)], 0.5)
    data = report_data({"device": "CPU"}, [good], 3.0, "mindrlhf acceptance")
    assert data["passed"]
    _, page = write_report(tmp_path, data)
    assert "What differs" not in page.read_text()
    assert not report_data({"device": "CPU"}, [], 3.0, "")["passed"], "nothing was checked"


def test_facts_have_versions_and_what_the_toolkit_says(tmp_path, monkeypatch):
    (tmp_path / "compiler").mkdir()
    (tmp_path / "compiler" / "version.info").write_text("# made up\nVersion=8.5.0\n")
    monkeypatch.setenv("ASCEND_HOME_PATH", str(tmp_path))
    monkeypatch.setattr("mindrlhf.acceptance.facts.shutil.which", lambda name: None)
    facts = machine_facts(CPU)
    assert facts["CANN"] == "Version=8.5.0"
    assert {"mindspore", "numpy", "python", "mindrlhf", "operators", "processor"} <= facts.keys()


def test_the_page_in_a_browser(tmp_path, browser):
    good = Result("linear float32", "operators", 1, [Finding("output", 1e-7, 1e-5)], 0.5)
    data = report_data({"device": "CPU"}, [good, failed_result()], 3.0, "mindrlhf acceptance")
    _, page = write_report(tmp_path, data)
    browser.open(page.as_uri())
    assert browser.errors == []
    assert browser.run("document.querySelectorAll('.check:not([hidden])').length") == 2
    browser.run("const i = document.getElementById('filter'); i.value = 'RMS'; i.dispatchEvent(new Event('input'))")
    assert browser.run("document.querySelectorAll('.check:not([hidden])').length") == 1
    assert browser.run("document.getElementById('count').textContent") == "1 of 2"
    browser.open(page.as_uri(), width=400)
    assert browser.run("document.documentElement.scrollWidth") <= 400
