import json
import math

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.image import imread

from mindrlhf.errors import UserError
from mindrlhf.metrics.plot import COLOURS, draw_metric, draw_runs, smooth

pytestmark = pytest.mark.filterwarnings("error")


def plot_runs(paths, output, **options):
    return draw_runs(paths, **options).write(output)


def write_run(folder, steps=60, **extra):
    folder.mkdir()
    path = folder / "metrics.jsonl"
    with path.open("w") as file:
        for step in range(1, steps + 1):
            values = {"critic/rewards/mean": step / steps, "response_length/mean": 30 - step / 10}
            values |= {name: value(step) for name, value in extra.items()}
            file.write(json.dumps({"step": step, **values}) + "\n")
    return path


BAD_METRICS = {
    "text": '"0.5"',
    "a list": "[0.5]",
    "a group": "{}",
    "true": "true",
    "beyond float64": "1" + "0" * 400,
    "5,000 digits": "7" * 5000,
    "deep": "[" * 100_000 + "]" * 100_000,
}


@pytest.mark.parametrize("kind", BAD_METRICS)
def test_a_metric_that_is_no_number_is_refused_by_file_and_line(tmp_path, kind):
    path = write_run(tmp_path / "run", steps=3)
    with path.open("a") as file:
        file.write(f'{{"step": 4, "critic/rewards/mean": {BAD_METRICS[kind]}}}\n')
    with pytest.raises(UserError, match=rf"{path}, line 4: "):
        plot_runs([path], tmp_path / "curves.png")
    assert not (tmp_path / "curves.png").exists()


@pytest.mark.parametrize("step", ["true", "1" + "0" * 30, "1.5", '"1"'])
def test_a_step_that_is_no_step_is_refused(tmp_path, step):
    path = write_run(tmp_path / "run", steps=3)
    with path.open("a") as file:
        file.write(f'{{"step": {step}, "critic/rewards/mean": 1}}\n')
    with pytest.raises(UserError, match=rf"{path}, line 4: no `step` in it"):
        plot_runs([path], tmp_path / "curves.png")


def test_a_huge_whole_number_is_drawn(tmp_path):
    path = write_run(tmp_path / "run", steps=3, **{"actor/kl_loss": lambda step: 10**30})
    assert plot_runs([path], tmp_path / "curves.png").is_file()


def share_of_colour(image, colour) -> float:
    """Fraction of pixels that are exactly this colour."""
    wanted = np.array([int(colour[at : at + 2], 16) for at in (1, 3, 5)]) / 255
    return float(np.mean(np.abs(image[..., :3] - wanted).max(axis=-1) < 0.01))


def test_three_seeds_in_one_figure(tmp_path):
    kl = {"actor/kl_loss": lambda step: None if step == 5 else step / 1e4}
    paths = [write_run(tmp_path / f"seed{seed}", **kl) for seed in range(3)]
    for run, path in enumerate(paths):
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        shifted = [row | {"critic/rewards/mean": row["critic/rewards/mean"] + run} for row in rows]
        path.write_text("".join(json.dumps(row) + "\n" for row in shifted))
    output = tmp_path / "docs" / "curves.png"
    assert plot_runs(paths, output, accuracy=[(0.4, 0.9)] * 3, title="Three seeds") == output
    image = imread(output)
    assert image.shape[0] >= 800
    assert image.shape[1] >= 1100
    for colour in COLOURS[:3]:
        assert share_of_colour(image, colour) > 0.005, "each run's bar and curves are there"
    assert share_of_colour(image, COLOURS[3]) == 0
    assert 0.5 < share_of_colour(image, "#FFFFFF") < 0.98
    assert [path.name for path in output.parent.iterdir()] == ["curves.png"]


def test_bars_have_the_heights_they_are_given(tmp_path):
    path = write_run(tmp_path / "run")
    low, high = (
        share_of_colour(imread(plot_runs([path], tmp_path / f"{after}.png", accuracy=[(0.1, after)])), COLOURS[0])
        for after in (0.2, 0.9)
    )
    assert high > 3 * low


def test_a_rising_reward_is_drawn_rising(tmp_path):
    path = write_run(tmp_path / "run")
    image = imread(plot_runs([path], tmp_path / "run.png"))[:420]
    wanted = np.array([0x00, 0x72, 0xB2]) / 255
    rows, columns = np.nonzero(np.abs(image[..., :3] - wanted).max(axis=-1) < 0.01)
    assert np.corrcoef(columns, -rows)[0, 1] > 0.99


def test_calls_of_tools_are_drawn_where_there_are_any(tmp_path):
    both = {"actor/entropy": lambda step: 1.0, "tools/failure_frequency": lambda step: None if step == 1 else 0.1}
    plain, calls = (
        imread(plot_runs([write_run(tmp_path / name, **more)], tmp_path / f"{name}.png"))[420:]
        for name, more in (("plain", {}), ("calls", {"tools/call_frequency": lambda step: step / 60}))
    )
    wanted = np.array([0x00, 0x72, 0xB2]) / 255

    def slope(image):
        rows, columns = np.nonzero(np.abs(image[..., :3] - wanted).max(axis=-1) < 0.01)
        return np.corrcoef(columns, -rows)[0, 1]

    assert slope(plain) < -0.9, "the length falls"
    assert slope(calls) > 0.9, "calls rise, in its place"
    image = imread(plot_runs([write_run(tmp_path / "both", **both)], tmp_path / "both.png"))
    assert share_of_colour(image, COLOURS[0]) > 0.005


@pytest.mark.parametrize("steps", [1, 2])
def test_very_short_runs_and_values_that_are_not_numbers(tmp_path, steps):
    path = write_run(
        tmp_path / "run", steps, **{"actor/kl_loss": lambda step: None, "actor/entropy": lambda step: None}
    )
    image = imread(plot_runs([path], tmp_path / "run.png"))
    assert share_of_colour(image, COLOURS[0]) > 1e-5


def test_reward_alone_and_same_folder_names(tmp_path):
    paths = []
    for parent in ("a", "b"):
        (tmp_path / parent).mkdir()
        path = tmp_path / parent / "metrics.jsonl"
        path.write_text('{"step": 1, "critic/rewards/mean": 0.5}\n{"step": 2, "critic/rewards/mean": 0.75}\n')
        paths.append(path)
    image = imread(plot_runs(paths, tmp_path / "run.png", labels=["same", "same"]))
    assert share_of_colour(image, COLOURS[1]) > 1e-4, "both runs are drawn"


def test_wrong_input_leaves_an_earlier_figure_alone(tmp_path):
    output = tmp_path / "run.png"
    output.write_bytes(b"earlier")
    with pytest.raises(UserError, match=r"cannot read .*absent"):
        plot_runs([tmp_path / "absent.jsonl"], output)
    empty = tmp_path / "metrics.jsonl"
    empty.write_text("")
    with pytest.raises(UserError, match=r"metrics.jsonl has no critic/rewards/mean"):
        plot_runs([empty], output)
    assert output.read_bytes() == b"earlier"


def test_smoothing():
    assert smooth(np.full(20, 3.0), 2.0) == pytest.approx(np.full(20, 3.0))
    line = np.arange(50.0)
    assert smooth(line, 2.0)[15:35] == pytest.approx(line[15:35]), "a straight line is neither bent nor shown late"
    noisy = np.random.default_rng(0).normal(0, 1, 400)
    assert smooth(noisy, 5.0)[30:-30].std() == pytest.approx(1 / math.sqrt(2 * math.sqrt(math.pi) * 5), rel=0.35)
    holes = np.array([1.0, np.nan, 1.0, np.inf, 1.0])
    assert smooth(holes, 1.0) == pytest.approx(np.ones(5))
    assert np.isnan(smooth(np.full(3, np.nan), 1.0)).all()


def test_a_notebook_shows_the_figure(tmp_path):
    """As a PNG of the same pixels as the file."""
    path = write_run(tmp_path / "run")
    shown = draw_runs([path])._repr_png_()
    (tmp_path / "shown.png").write_bytes(shown)
    assert (imread(tmp_path / "shown.png") == imread(plot_runs([path], tmp_path / "run.png"))).all()


@pytest.mark.parametrize("names", [["a", "b", "c"], [f"a_variant_with_a_long_name_{i}" for i in range(6)]])
def test_a_legend_lies_within_the_figure(tmp_path, names):
    """One line of entries if they fit into the width, several otherwise."""
    run = write_run(tmp_path / "run")
    figure = draw_metric({"": {name: [run] for name in names}}, "critic/rewards/mean")
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    (legend,) = figure.legends
    extent, whole = legend.get_window_extent(canvas.get_renderer()), figure.bbox
    assert 0 <= extent.x0 < extent.x1 <= whole.x1
    lines = {round(text.get_window_extent(canvas.get_renderer()).y0) for text in legend.get_texts()}
    assert (len(lines) == 1) == (len(names) == 3)
