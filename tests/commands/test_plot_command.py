"""`mindrlhf plot`: what of the command line reaches the figure; the figure itself is tested with `metrics/plot.py`."""

import json

import numpy as np
import pytest
from matplotlib.image import imread

from mindrlhf import cli
from mindrlhf.metrics.plot import COLOURS, draw_runs

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
        (("--metric", "x"), "--metric draws runs, or those of each --panel or --group; give one of them."),
        (("--metric", "x", "--panel", "a"), "--panel a names no run"),
        (("--metric", "x", "--panel", "a", "RUN", "--panel", "a", "RUN"), "two --panel have the same name"),
        (("--metric", "x", "--labels", "a", "--panel", "a", "RUN"), "do not go with --metric"),
        (("--metric", "actor/*", "--panel", "a", "RUN"), "has no metric actor/*"),
    ],
)
def test_metrics_and_panels_that_make_no_figure(runs, tmp_path, capsys, arguments, message):
    output = tmp_path / "curve.png"
    assert plot("--output", output, *(runs[0] if part == "RUN" else part for part in arguments)) == 2
    assert message in capsys.readouterr().err
    assert not output.exists()


@pytest.fixture
def seeds(tmp_path):
    """Two seeds of two methods, with a measured accuracy."""
    for method, slope in (("grpo", 1.0), ("rloo", 0.5)):
        for seed in (0, 1):
            folder = tmp_path / f"{method}_seed{seed}"
            folder.mkdir()
            rows = [
                {"step": step, "critic/rewards/mean": slope * step + seed, "val-core/a/acc/mean@1": step / 20}
                for step in range(1, 10)
            ]
            (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return sorted(tmp_path.glob("*_seed*"))


@pytest.mark.parametrize(("suffix", "start"), [("pdf", b"%PDF"), ("svg", b"<?xml"), ("png", b"\x89PNG")])
def test_the_suffix_names_the_format(seeds, tmp_path, suffix, start):
    first, second = tmp_path / f"a.{suffix}", tmp_path / f"b.{suffix}"
    assert plot(*seeds, "--output", first) == plot(*seeds, "--output", second) == 0
    assert first.read_bytes().startswith(start)
    assert first.read_bytes() == second.read_bytes(), "no date, no random names"


def test_another_suffix_is_refused(seeds, tmp_path, capsys):
    for name, found in (("a.jpg", "ends in .jpg"), ("a", "has no suffix")):
        assert plot(*seeds, "--output", tmp_path / name) == 2
        assert f"{found}; give a name that ends in .png or .pdf or .svg or .csv." in capsys.readouterr().err
        assert not (tmp_path / name).exists()


def lines_of(figure) -> dict:
    return {line.get_label(): line.get_ydata() for line in figure.axes[0].get_lines() if line.get_label()[0] != "_"}


def test_mean_and_band_over_seeds(seeds, tmp_path):
    files = {name: [run / "metrics.jsonl" for run in seeds if run.name.startswith(name)] for name in ("grpo", "rloo")}
    figure = draw_runs(files, smoothing=0)
    lines = lines_of(figure)
    assert lines.keys() == {"grpo (2 runs)", "rloo (2 runs)"}
    np.testing.assert_allclose(lines["grpo (2 runs)"], np.arange(1, 10) + 0.5)
    band = figure.axes[0].collections[0].get_paths()[0].vertices
    at = band[np.isclose(band[:, 0], 5.0)][:, 1]
    np.testing.assert_allclose([at.min(), at.max()], [5.5 - np.sqrt(0.5), 5.5 + np.sqrt(0.5)])


def test_groups_by_name_and_by_seed_are_the_same_picture(seeds, tmp_path):
    grpo, rloo = seeds[:2], seeds[2:]
    first, second, third = (tmp_path / f"{name}.svg" for name in "abc")
    assert plot("--group", "grpo", *grpo, "--group", "rloo", *rloo, "--output", first) == 0
    assert plot(*seeds, "--by_seed", "--output", second) == 0
    assert plot(*seeds, "--output", third) == 0
    assert first.read_bytes() == second.read_bytes() != third.read_bytes()
    assert plot(*seeds, "--by_seed", "--metric", "critic/rewards/mean", "--output", tmp_path / "metric.pdf") == 0


def test_accuracy_as_it_was_measured(seeds, tmp_path, capsys):
    measured, typed = tmp_path / "a.svg", tmp_path / "b.svg"
    assert plot(*seeds, "--by_seed", "--accuracy", "--output", measured) == 0
    assert plot(*seeds, "--by_seed", "--accuracy", 0.05, 0.45, 0.05, 0.45, "--output", typed) == 0
    assert measured.read_bytes() == typed.read_bytes()


def test_accuracy_of_a_run_without_one(runs, tmp_path, capsys):
    assert plot(*runs, "--accuracy", "--output", tmp_path / "a.png") == 2
    assert "--accuracy: a run has measured none; set data.val_dataset" in capsys.readouterr().err


def test_size_and_smoothing(seeds, tmp_path):
    assert plot(seeds[0], "--size", "3x2", "--output", tmp_path / "a.png") == 0
    assert imread(tmp_path / "a.png").shape[:2] == (240, 360)
    files = [seeds[0] / "metrics.jsonl"]
    raw, smoothed = (lines_of(draw_runs(files, smoothing=width))["grpo_seed0"] for width in (0, 3))
    np.testing.assert_allclose(raw, np.arange(1, 10))
    assert smoothed[0] > raw[0]


def test_a_table_of_several_runs(seeds, tmp_path):
    assert plot(*seeds[:2], "--output", tmp_path / "a.csv") == 0
    lines = (tmp_path / "a.csv").read_text().splitlines()
    assert lines[0] == "run,step,critic/rewards/mean,val-core/a/acc/mean@1"
    assert lines[1] == "grpo_seed0,1,1.0,0.05"
    assert len(lines) == 19
    assert plot(*seeds, "--metric", "critic/*", "--output", tmp_path / "b.csv") == 0
    assert (tmp_path / "b.csv").read_text().startswith("run,step,critic/rewards/mean\n")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--metric", "critic/reward/mean"), "did you mean critic/rewards/mean?"),
        (("--size", "0x3"), "--size: '0x3' should be two numbers above 0, in inches, as 7x5"),
        (("--smoothing", -1), "--smoothing is -1.0; give 0 or more steps."),
        (("--group", "a", "b"), "--group names runs, so leave out others"),
        (("--by_seed", "--labels", "a", "b"), "--by_seed names its lines itself"),
    ],
)
def test_new_mistakes(runs, tmp_path, capsys, options, message):
    assert plot(*runs, "--output", tmp_path / "curve.png", *options) == 2
    assert message in capsys.readouterr().err
