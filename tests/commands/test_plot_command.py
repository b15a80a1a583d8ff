"""`mindrlhf plot`: what of the command line reaches the figure; the figure itself is tested with `metrics/plot.py`."""

import json

import numpy as np
import pytest
from matplotlib.image import imread

from mindrlhf import cli
from mindrlhf.metrics.plot import COLOURS

SEEDS = ("seed0", "seed1")


@pytest.fixture
def runs(tmp_path):
    """Two output folders of runs."""
    for seed in SEEDS:
        (tmp_path / seed).mkdir()
        rows = [json.dumps({"step": step, "critic/rewards/mean": step / 9}) + "\n" for step in range(1, 10)]
        (tmp_path / seed / "metrics.jsonl").write_text("".join(rows))
    return [tmp_path / seed for seed in SEEDS]


def plot(*arguments) -> int:
    return cli.main(["plot", *map(str, arguments)])


def test_folders_and_files_give_the_same_figure(runs, tmp_path, capsys):
    output = tmp_path / "docs" / "curve.png"
    options = ("--title", "Two seeds", "--accuracy", 0.5, 0.8, 0.4, 0.9)
    assert plot(*runs, "--output", output, *options) == 0
    assert capsys.readouterr().out == f"{output}\n"
    files = [run / "metrics.jsonl" for run in runs]
    assert plot(*files, "--output", tmp_path / "same.png", *options, "--labels", *SEEDS) == 0
    assert plot(*files, "--output", tmp_path / "other.png", *options, "--labels", "a", "b") == 0
    figure, same, other = (imread(path) for path in (output, tmp_path / "same.png", tmp_path / "other.png"))
    assert np.array_equal(figure, same)
    assert not np.array_equal(figure, other)


def test_accuracy_belongs_to_its_run_in_pairs(runs, tmp_path):
    for name, numbers in (("a", (0.1, 0.2, 0.3, 0.9)), ("b", (0.1, 0.3, 0.2, 0.9)), ("c", ())):
        assert plot(*runs, "--output", tmp_path / f"{name}.png", *(("--accuracy", *numbers) if numbers else ())) == 0
    a, b, c = (imread(tmp_path / f"{name}.png") for name in "abc")
    assert not np.array_equal(a, b)
    assert not np.array_equal(b, c)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--labels", "one"), "--labels has 1 names for 2 runs; give one for each run."),
        (("--accuracy", 0.5, 0.8), "--accuracy has 2 numbers for 2 runs; give two for each run: before and after."),
        (("--accuracy", 0.5, 0.8, 0.9), "--accuracy has 3 numbers for 2 runs"),
    ],
)
def test_numbers_that_do_not_match(runs, tmp_path, capsys, options, message):
    assert plot(*runs, "--output", tmp_path / "curve.png", *options) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "curve.png").exists()


def test_no_such_run(tmp_path, capsys):
    assert plot(tmp_path / "none", "--output", tmp_path / "curve.png") == 2
    assert f"mindrlhf plot: cannot read {tmp_path / 'none'}" in capsys.readouterr().err


def test_one_metric_in_panels(runs, tmp_path, capsys):
    """A run that lies above the other in one panel and below it in the other."""
    panels = []
    for title, order in (("one", (0, 1)), ("two", (1, 0))):
        panels += ["--panel", title]
        for seed, height in zip(SEEDS, order, strict=True):
            folder = tmp_path / title / seed
            folder.mkdir(parents=True)
            rows = [{"step": step, f"val-core/{title}/acc/mean@1": height} for step in (0, 5, 10)]
            rows.insert(1, {"step": 1, "critic/rewards/mean": 0.0})
            (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
            panels.append(folder)
    output = tmp_path / "panels.png"
    assert plot("--metric", "val-core/*/acc/mean@1", *panels, "--output", output) == 0
    assert capsys.readouterr().out == f"{output}\n"
    image = imread(output)
    height, width = image.shape[0], image.shape[1]
    places = {}
    for seed, colour in zip(SEEDS, COLOURS[:2], strict=True):
        wanted = np.array([int(colour[at : at + 2], 16) for at in (1, 3, 5)]) / 255
        drawn = np.abs(image[: int(0.8 * height), :, :3] - wanted).max(axis=-1) < 0.01
        halves = drawn[:, : width // 2], drawn[:, width // 2 :]
        places[seed] = [float(np.nonzero(half)[0].mean()) for half in halves]
    (first, second), (third, fourth) = places["seed0"], places["seed1"]
    assert first > third + 100
    assert fourth > second + 100


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "there is no run to draw"),
        (("--panel", "a", "RUN"), "--panel goes with --metric"),
        (("--metric", "x"), "--metric draws runs, or those of each --panel; give one of the two."),
        (("--metric", "x", "--panel", "a"), "--panel a names no run"),
        (("--metric", "x", "--panel", "a", "RUN", "--panel", "a", "RUN"), "two --panel have the same title"),
        (("--metric", "x", "--labels", "a", "--panel", "a", "RUN"), "do not go with --metric"),
        (("--metric", "actor/*", "--panel", "a", "RUN"), "has no metric actor/*"),
    ],
)
def test_metrics_and_panels_that_make_no_figure(runs, tmp_path, capsys, arguments, message):
    output = tmp_path / "curve.png"
    assert plot("--output", output, *(runs[0] if part == "RUN" else part for part in arguments)) == 2
    assert message in capsys.readouterr().err
    assert not output.exists()
