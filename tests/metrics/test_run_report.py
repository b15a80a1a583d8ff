"""The report without a browser: reading a run, and the content of the page."""

import json
import re

import pytest
from run_folders import HOSTILE, make_run

from mindrlhf.errors import UserError
from mindrlhf.metrics.report.charts import MOST_POINTS, Chart, curves, resolve
from mindrlhf.metrics.report.html import render, report_data, to_json
from mindrlhf.metrics.report.run import differing, flatten, read_run
from mindrlhf.metrics.writers import run_labels


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("runs") / "first", steps=12)


def data_of(page: str) -> dict:
    """What the page's own script would read."""
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)[1])


def test_a_run_as_it_is(folder):
    run = read_run(folder, "a", samples=3, most_steps=4)
    assert [row["step"] for row in run.rows] == list(range(1, 13))
    assert list(dict.fromkeys(group.step for group in run.groups)) == [1, 5, 8, 12], "evenly, both ends included"
    assert [len(group.samples) for group in run.groups] == [4] * 4, "whole groups"
    assert run.settings["grpo.optimizer.lr"] == "1e-06"
    assert read_run(folder / "metrics.jsonl", "a", 3, 4).groups == run.groups, "the metrics file names the run too"
    assert read_run(folder, "a", samples=5, most_steps=1).groups[1].prompt_id == 11


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("prompt_id", [1]),
        ("prompt_id", "1"),
        ("prompt", None),
        ("completion", 7),
        ("reward", "high"),
        ("reward", True),
        ("reward", 10**400),
        ("rewards", [1.0]),
        ("rewards", {"gsm8k": "1"}),
        ("response_length", "12"),
        ("ground_truth", {"a": 1}),
    ],
)
def test_rollouts_of_another_kind_are_refused_by_file_and_line(tmp_path, key, value):
    make_run(tmp_path, steps=1)
    path = tmp_path / "rollouts" / "step_000001.jsonl"
    rows = [json.loads(line) for line in path.read_text().split("\n")[:-1]]
    rows[2][key] = value
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(UserError, match=rf"{path}, line 3: {key} is "):
        read_run(tmp_path, "a", samples=8, most_steps=1)


def test_a_label_that_is_no_utf8_is_shown_as_a_code(folder):
    page = render([read_run(folder, "a\udc80b", samples=1, most_steps=1)])
    assert page.encode()
    assert "<title>a\\udc80b" in page


def test_rollouts_of_an_earlier_and_longer_run_are_left_out(tmp_path):
    make_run(tmp_path, steps=9)
    make_run(tmp_path, steps=2)
    assert read_run(tmp_path, "a", 1, 40).rollout_steps == [1, 2]


def test_no_text_of_a_run_becomes_markup(folder):
    page = render([read_run(folder, "</title><script>window.hacked = 3</script>", 8, 40)])
    assert page.count("</script>") == 2
    assert "window.hacked = 1</script>" not in page
    assert "<script>window.hacked" not in page
    assert data_of(page)["runs"][0]["groups"][0]["samples"][0]["completion"] == HOSTILE.replace("\ud800", "")
    assert json.loads(to_json({"a": HOSTILE})) == {"a": HOSTILE}, "half a surrogate pair too"
    to_json({"a": HOSTILE}).encode("utf-8")


def test_metrics_that_are_not_finite_are_gaps(folder):
    data = report_data([read_run(folder, "a", 1, 1)])
    assert data["runs"][0]["metrics"]["actor/grad_norm"][2] is None
    assert data["runs"][0]["metrics"]["val-core/gsm8k/acc/mean@1"][:5] == [None] * 4 + [pytest.approx(0.35)]
    titles = [chart["title"] for chart in data["learning"] + data["cost"]]
    assert {"Accuracy on held-out problems", "Response length"} <= set(titles)
    assert "Value loss of the critic" not in titles, "a chart without a metric is left out"


def test_a_long_run_is_shown_as_means():
    rows = [{"step": step, "a": float(step), **({"b": 7.0} if step == 5 else {})} for step in range(1, 4 * MOST_POINTS)]
    steps, values, width = curves(rows)
    assert width == 4
    assert steps[:2] == [4, 8]
    assert values["a"][:2] == [2.5, 6.5]
    assert values["b"][:3] == [None, 7.0, None]
    assert len(steps) == len(values["a"]) == MOST_POINTS


def test_patterns_are_of_whole_names():
    names = ["timing_s/step", "timing_s/gen", "timing_s/ref", "val-core/a/acc/mean@1"]
    chart = Chart("", "", ("timing_s/ref", "timing_s/.+"), remainder="timing_s/step")
    assert resolve(chart, names) == ["timing_s/ref", "timing_s/gen"]
    assert resolve(Chart("", "", ("timing_s",)), names) == []


def test_what_differs_between_runs(folder, tmp_path):
    other = make_run(tmp_path / "second", steps=2, seed=1, lr=3e-6, rollouts=False)
    bare = make_run(tmp_path / "third", steps=2, rollouts=False)
    (bare / "settings.json").unlink()
    runs = [read_run(path, path.name, 1, 1) for path in (folder, other, bare)]
    assert differing(runs) == ["grpo.optimizer.lr", "grpo.seed"]
    assert flatten({"a": {"b": [1, 2], "c": None}, "d": {}}) == {"a.b": "[1, 2]", "a.c": "null", "d": "{}"}
    assert run_labels([folder, folder / "metrics.jsonl", other]) == ["first (1)", "first (2)", "second (3)"]


def test_what_cannot_be_read_says_so(tmp_path):
    with pytest.raises(UserError, match=r"there is no metrics\.jsonl in it; give the output folder of a run"):
        read_run(tmp_path, "a", 1, 1)
    assert read_run(tmp_path, "a", 1, 1, begun=False).rows == []
    run = make_run(tmp_path / "run", steps=1)
    (run / "settings.json").write_text("{")
    with pytest.raises(UserError, match=r"settings\.json: is not valid JSON"):
        read_run(run, "a", 1, 1)
    (run / "settings.json").unlink()
    (run / "rollouts" / "step_000001.jsonl").write_text('{"prompt_id": 1, "prompt": "a", "completion": "b"}\n')
    with pytest.raises(UserError, match=r"step_000001\.jsonl, line 1: reward is missing, and must be a number"):
        read_run(run, "a", 1, 1)
