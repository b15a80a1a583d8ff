import io
import math
import re

import numpy as np
import pytest

from mindrlhf.metrics.console import HEADER_EVERY, ConsoleWriter, short_duration, short_number, trend

VALUES = {
    "critic/rewards/mean": 0.431,
    "reward/gsm8k/mean": 0.431,
    "group/zero_std_fraction": 0.25,
    "actor/pg_loss": 2e-9,
    "actor/kl_loss": 0.00051,
    "actor/entropy": 0.82,
    "actor/grad_norm": 1.234,
    "response_length/mean": 23.14,
    "response_length/clip_ratio": 0.02,
    "timing_s/gen": 0.41,
    "timing_s/update_actor": 0.8,
    "timing_s/ref": 0.05,
    "timing_s/step": 1.3,
    "perf/throughput": 3210.0,
}
OFTEN = {
    "val-core/gsm8k/acc/mean@1": 0.625,
    "reward/format/mean": 0.95,
    "tools/call_frequency": 1.25,
    "tools/failure_frequency": 0.07,
}


@pytest.fixture
def width(monkeypatch):
    def of(columns: int) -> None:
        monkeypatch.setenv("COLUMNS", str(columns))

    of(100)
    return of


def lines(*steps, total=200, **arguments):
    stream = io.StringIO()
    writer = ConsoleWriter(total, stream=stream, **arguments)
    for step, values in steps:
        writer.write(step, values)
    writer.close()
    return stream.getvalue().splitlines()


def columns(written) -> list[dict[str, str]]:
    """Title -> cell of each line, by the header above it."""
    found, titles = [], []
    for line in written:
        if line.split()[0] == "step":
            titles = line.split()
        elif re.match(r" *\d+/\d+", line):
            found.append(dict(zip(titles, line.split(), strict=True)))
    return found


def test_a_line_and_its_header(width):
    header, line = lines((12, VALUES), earlier=[0.4, 0.42])
    assert header == "   step   reward   trend  entropy       kl  length   cut  same    time     gen   tok/s    left"
    assert line == " 12/200     0.43   +0.03     0.82  5.1e-04    23.1    2%   25%    1.3s    0.4s    3.2k       -"


ODD = (math.nan, math.inf, -2e300, 1e9)
ROWS = [VALUES, VALUES | OFTEN, {}, OFTEN, *(dict.fromkeys(VALUES | OFTEN, value) for value in ODD)]


@pytest.mark.parametrize("columns_there", [10, 40, 80, 100, 200])
def test_no_line_is_wider_than_the_terminal_or_100_characters(width, columns_there):
    width(columns_there)
    steps = [(step, row) for step, row in enumerate(ROWS, start=1)]
    for total in (9, 200, 1_000_000):
        written = lines(*steps, total=total)
        assert len(columns(written)) == len(steps)
        number = 2 * len(str(total)) + 1  # that of the step is always there
        assert max(map(len, written)) <= max(number, min(100, columns_there))


def test_narrow_lines_keep_what_says_whether_it_learns(width):
    shown = {}
    for characters in (40, 80, 100):
        width(characters)
        (shown[characters],) = columns(lines((5, VALUES | OFTEN), earlier=[0.1]))
    assert [*shown[40]] == ["step", "reward", "trend", "time", "left"]
    assert shown[40].keys() < shown[80].keys() < shown[100].keys()
    assert {"accuracy", "entropy", "length", "cut"} <= shown[80].keys()
    assert {"kl", "same", "tok/s"} <= shown[100].keys()


def test_every_line_of_a_header_has_its_columns(width):
    written = lines((1, VALUES), (2, VALUES | OFTEN), (3, VALUES))
    assert len([line for line in written if "reward" in line]) == 2, "a new header where a column is new"
    before, at, after = columns(written)
    assert "accuracy" not in before
    assert (at["accuracy"], after["accuracy"]) == ("0.625", "-")
    assert len(written[-1]) == len(written[-2])


def test_the_header_comes_again(width):
    written = lines(*((step, VALUES) for step in range(1, 2 * HEADER_EVERY + 2)))
    assert [number for number, line in enumerate(written) if "reward" in line] == [0, 21, 42]


def test_means_of_several_reward_functions_where_there_is_room(width):
    few = {"critic/rewards/mean": 0.5, "reward/a/mean": 1.0, "reward/format_of_answers/mean": 0.25}
    (row,) = columns(lines((1, few)))
    assert (row["a"], row["format_of_"]) == ("1.00", "0.25")
    (row,) = columns(lines((1, {"critic/rewards/mean": 0.5, "reward/a/mean": 0.5})))
    assert "a" not in row, "it is the reward"


def test_accuracy_is_the_mean_of_all_sources(width):
    (row,) = columns(lines((0, {"val-core/a/acc/mean@1": 0.5, "val-core/b/acc/mean@4": 0.75})))
    assert row == {"step": "0/200", "accuracy": "0.625"}


def test_fine_tuning_shows_its_loss(width):
    steps = [(step, {"train/loss": loss, "timing_s/step": 1.0}) for step, loss in enumerate((3.0, 2.0), start=1)]
    assert columns(lines(*steps, total=2))[-1] == {
        "step": "2/2",
        "loss": "2.00",
        "trend": "-1.00",
        "time": "1.0s",
        "left": "0.0s",
    }


def test_the_files_alone_have_the_loss_of_grpo(width):
    assert "loss" not in "".join(lines((1, VALUES)))


def test_compiling_has_its_own_line_and_is_in_no_time(width):
    first = VALUES | {"timing_s/compile": 12.0, "timing_s/step": 13.3}
    written = lines((1, first), (2, VALUES))
    assert written[2] == "graphs were compiled for 12s, in no column above"
    one, two = columns(written)
    assert one["time"] == two["time"] == "1.3s"
    assert (one["left"], two["left"]) == ("-", "4m17s"), "198 steps of 1.3 s; the first step is no sign"
    assert one["tok/s"] == "32.8k", "3,210 tokens/s over 13.3 s are 42,700 tokens in 1.3 s"
    assert len(written) == 4


def test_time_left_counts_a_late_compile_once(width):
    """Compiling for 3 s at the second step is past when the line is written."""
    row = {"timing_s/step": 2.0}
    steps = [(1, row | {"timing_s/compile": 1.9}), (2, {"timing_s/step": 5.0, "timing_s/compile": 3.0}), (3, row)]
    assert [row["left"] for row in columns(lines(*steps, total=13))] == ["-", "22s", "20s"]


def test_time_left_follows_the_forecast_until_the_third_step(width):
    """The first step's own time is what is left of compiling: 0.1 s, where a step takes 2."""
    seconds = ((10.0, 9.9), (2.0, 0.0), (2.0, 0.0))
    steps = [(step, {"timing_s/step": s, "timing_s/compile": c}) for step, (s, c) in enumerate(seconds, start=1)]
    assert [row["left"] for row in columns(lines(*steps, total=13, forecast_s=1.8))] == ["22s", "20s", "20s"]


def test_time_left_follows_the_median_step(width):
    steps = [(step, {"timing_s/step": seconds}) for step, seconds in enumerate((9.0, 2.0, 60.0, 2.0), start=1)]
    assert columns(lines(*steps, total=14))[-1]["left"] == "20s"


def test_lines_every_few_steps(width):
    steps = [(step, VALUES) for step in range(1, 25)]
    steps[6] = (7, VALUES | {"val-core/gsm8k/acc/mean@1": 0.5})
    shown = [row["step"] for row in columns(lines(*steps, total=24, every=10))]
    assert shown == ["1/24", "7/24", "10/24", "20/24", "24/24"]


def test_the_trend_counts_steps_without_a_line(width):
    rewards = [(step, {"critic/rewards/mean": 0.1 * step}) for step in range(1, 5)]
    assert columns(lines(*rewards, every=4))[-1]["trend"] == "+0.20", "(0.3 + 0.4) / 2 - (0.1 + 0.2) / 2"


def test_nan_is_shown_and_does_not_spoil_the_trend(width):
    steps = [(1, {"critic/rewards/mean": 0.5}), (2, {"critic/rewards/mean": math.nan})]
    shown = columns(lines(*steps, (3, {"critic/rewards/mean": 0.75})))
    assert shown[1]["reward"] == "nan"
    assert shown[2]["trend"] == "+0.25"


def test_trend_tells_learning_from_noise():
    noise = np.random.default_rng(0).normal(0, 0.1, 100)
    assert trend(list(0.3 + np.linspace(0, 0.5, 100) + noise)) == pytest.approx(0.45, abs=0.1)
    assert abs(trend(list(0.3 + noise))) < 0.1
    assert trend([1.0, 2.0, 4.0]) == 3.0
    assert trend([1.0]) is None
    assert trend([1.0] * 10 + [5.0] * 100 + [2.0] * 10) == 1.0


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (0.0123, "0.0123"),
        (-0.5, "-0.50"),
        (2e-6, "2.0e-06"),
        (23.14, "23.1"),
        (432.1, "432"),
        (3210, "3.2k"),
        (1.5e6, "1.5M"),
        (2e12, "2.0e+12"),
        (math.inf, "inf"),
    ],
)
def test_short_number(value, text):
    assert short_number(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.41, "0.4s"),
        (9.96, "10s"),
        (59.6, "1m00s"),
        (192, "3m12s"),
        (3599.9, "1h00m"),
        (3720, "1h02m"),
        (90000, "25h00m"),
        (48 * 3600 - 1, "47h59m"),
        (99 * 3600, "4d03h"),
    ],
)
def test_short_duration(seconds, text):
    assert short_duration(seconds) == text


def test_names_from_the_data_do_not_steer_the_terminal(width):
    values = {"critic/rewards/mean": 0.5, "reward/\x1b[2J\ud800/mean": 0.5, "reward/a/mean": 0.5}
    header, _ = lines((1, values))
    assert "\\u001b[2J\\ud800" in header
    assert header.isprintable()


@pytest.mark.parametrize("seconds", [math.inf, -math.inf, math.nan])
def test_a_time_that_is_no_number_is_a_dash(seconds):
    assert short_duration(seconds) == "-"
