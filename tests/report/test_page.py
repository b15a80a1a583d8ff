"""The report without a browser: reading a run, and the content of the page."""

import json
import re

import pytest
from run_folders import HOSTILE, make_run, unpacked

from mindrlhf.errors import UserError
from mindrlhf.metrics.writers import run_labels
from mindrlhf.report.answers import AnswerReader
from mindrlhf.report.charts import MOST_POINTS, Chart, chart_data, curves, resolve
from mindrlhf.report.html import render, report_data, to_json
from mindrlhf.report.run import RunOutputs, differing, read_run


def read(folder, label: str = "a", begun: bool = True) -> RunOutputs:
    return read_run(folder, label, AnswerReader(), begun)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("runs") / "first", steps=12)


def data_of(page: str) -> dict:
    """What the page's own script would read."""
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)[1])


def test_a_run_as_it_is(folder):
    run = read(folder)
    assert [row["step"] for row in run.rows] == list(range(1, 13))
    assert run.flat_settings["grpo.optimizer.lr"] == "1e-06"
    assert not any("starts" in name for name in run.flat_settings), "they differ between any two runs"
    assert run.starts[0]["host"] == "h"
    again = read(folder / "metrics.jsonl").answers
    assert again.index == run.answers.index, "the metrics file names the run too"


def test_a_label_that_is_no_utf8_is_shown_as_a_code(folder):
    page = render([read(folder, "a\udc80b")], "x").html
    assert page.encode()
    assert "<title>a\\udc80b" in page


def test_no_text_of_a_run_becomes_markup(folder):
    run = read(folder, "</title><script>window.hacked = 3</script>")
    page = render([run], "x").html
    assert page.count("</script>") == 2 + len(run.answers.chunks)
    assert "<script>window.hacked" not in page
    assert unpacked(run.answers)[0]["answers"][1]["text"] == HOSTILE.replace("\ud800", "")
    assert json.loads(to_json({"a": HOSTILE})) == {"a": HOSTILE}, "half a surrogate pair too"
    to_json({"a": HOSTILE}).encode("utf-8")


def test_answers_of_a_large_report_are_files(folder):
    run = read(folder)
    packed = sum(map(len, run.answers.chunks.values()))
    inside, outside = render([run], "x", most_inside=packed), render([run], "x_data", most_inside=packed - 1)
    assert inside.files == {}
    assert list(outside.files) == [f"{name}.js" for name in run.answers.chunks]
    for name, content in run.answers.chunks.items():
        assert f'<script type="text/plain" id="chunk-{name}">{content}</script>' in inside.html
        assert content not in outside.html
        assert outside.files[f"{name}.js"] == f'reportChunk("{name}","{content}")\n'
    assert data_of(outside.html)["folder"] == "x_data"


def test_metrics_that_are_not_finite_are_gaps(folder):
    data = report_data([read(folder)])
    assert data["runs"][0]["metrics"]["actor/grad_norm"][2] is None
    assert data["runs"][0]["metrics"]["val-core/gsm8k/acc/mean@1"][:5] == [None] * 4 + [pytest.approx(0.35)]
    titles = [chart["title"] for chart in data["learning"] + data["cost"]]
    assert {"Accuracy on held-out problems", "Response length", "Rewards of single answers"} <= set(titles)
    assert "Value loss of the critic" not in titles, "a chart without a metric is left out"


def test_charts_that_need_answers_or_several_metrics():
    charts = [Chart("all", "", kind="rewards"), Chart("two", "", ("a.",), least=2)]
    assert [chart["title"] for chart in chart_data(charts, ["a1", "a2"], answers=True)] == ["all", "two"]
    assert chart_data(charts, ["a1"], answers=False) == []


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
    runs = [read(path, path.name) for path in (folder, other, bare)]
    assert differing(runs) == ["grpo.optimizer.lr", "grpo.seed"]
    assert run_labels([folder, folder / "metrics.jsonl", other]) == ["first (1)", "first (2)", "second (3)"]
    kinds = [tmp_path / "quickstart" / kind / "metrics.jsonl" for kind in ("grpo", "sft")]
    assert run_labels(kinds) == ["quickstart/grpo", "quickstart/sft"]


def test_what_cannot_be_read_says_so(tmp_path):
    with pytest.raises(UserError, match=r"there is no metrics\.jsonl in it; give the output folder of a run"):
        read(tmp_path)
    assert read(tmp_path, begun=False).rows == []
    run = make_run(tmp_path / "run", steps=1)
    (run / "settings.json").write_text("{")
    with pytest.raises(UserError, match=r"settings\.json: is not valid JSON"):
        read(run)
    (run / "settings.json").write_text('{"starts": 3, "a": 1}')
    assert read(run).starts == []
    (run / "rollouts" / "step_000001.jsonl").write_text('{"prompt_id": 1, "prompt": "a", "completion": "b"}\n')
    with pytest.raises(UserError, match=r"step_000001\.jsonl, line 1: reward is missing, and must be a number"):
        read(run)
