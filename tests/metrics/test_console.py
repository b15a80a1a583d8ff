import io
import math

import numpy as np
import pytest

from mindrlhf.metrics.console import ConsoleWriter, short_duration, short_number, trend

VALUES = {
    "critic/rewards/mean": 0.431,
    "reward/gsm8k/mean": 0.431,
    "group/zero_std_fraction": 0.25,
    "actor/pg_loss": 0.0123,
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


def lines(*steps, total=200, **arguments):
    stream = io.StringIO()
    writer = ConsoleWriter(total, stream=stream, **arguments)
    for step, values in steps:
        writer.write(step, values)
    writer.close()
    return stream.getvalue().splitlines()


def test_one_line_says_it_all():
    (line,) = lines((12, VALUES), earlier_rewards=[0.4, 0.42])
    assert line == (
        "step 12/200 | reward 0.43 (+0.03) | loss 0.0123 | kl 5.1e-04 | entropy 0.82 | grad 1.23 | len 23.1 (clip 2%)"
        " | gen 0.4s train 0.8s | 3.2k tok/s | eta 4m04s"
    )


def test_what_is_only_there_at_times():
    first = VALUES | {
        "reward/format/mean": 0.95,
        "group/zero_std_fraction": 0.75,
        "val-core/gsm8k/acc/mean@1": 0.625,
        "timing_s/compile": 12.0,
        "timing_s/ref": 2.0,
        "timing_s/step": 15.3,
    }
    (line,) = lines((1, first))
    assert "| reward 0.43 | gsm8k 0.43 format 0.95 |" in line
    assert "| same reward 75% | acc gsm8k 0.625 |" in line
    assert "| gen 0.4s train 0.8s ref 2.0s compile 12s |" in line
    assert line.endswith("eta 10m57s"), "199 steps of 3.3 s: the next steps do not compile"


@pytest.mark.parametrize(
    ("failed", "text"), [(None, "calls 1.25"), (0.0, "calls 1.25"), (0.07, "calls 1.25 (7% failed)")]
)
def test_calls_of_tools(failed, text):
    (line,) = lines((12, VALUES | {"tools/call_frequency": 1.25, "tools/failure_frequency": failed}))
    assert f"| len 23.1 (clip 2%) | {text} | gen 0.4s" in line


def test_values_that_a_step_lacks_are_left_out_and_the_last_step_has_no_eta():
    assert lines((0, {"val-core/gsm8k/acc/mean@1": 0.5}))[0] == "step 0/200 | acc gsm8k 0.500"
    assert lines((1, {"reward/a/mean": 1.0, "reward/b/mean": 0.5}))[0] == "step 1/200 | a 1.00 b 0.50"
    assert "eta" not in lines((200, VALUES))[0]


def test_eta_follows_the_median_step():
    steps = [(step, {"timing_s/step": seconds}) for step, seconds in enumerate((2.0, 2.0, 60.0), start=1)]
    assert lines(*steps, total=13)[-1] == "step 3/13 | eta 20s"


def test_nan_is_shown_and_does_not_spoil_the_trend():
    steps = [(1, {"critic/rewards/mean": 0.5}), (2, {"critic/rewards/mean": math.nan, "actor/pg_loss": math.nan})]
    written = lines(*steps, (3, {"critic/rewards/mean": 0.75}))
    assert written[1].endswith("reward nan | loss nan")
    assert written[2].endswith("reward 0.75 (+0.25)")


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
    ],
)
def test_short_duration(seconds, text):
    assert short_duration(seconds) == text


def test_names_from_the_data_do_not_steer_the_terminal():
    values = {"critic/rewards/mean": 0.5, "val-core/\x1b[2J\ud800/acc/mean@1": 0.5}
    (line,) = lines((1, values))
    assert "\\u001b[2J\\ud800" in line
    assert line.isprintable()


@pytest.mark.parametrize("seconds", [math.inf, -math.inf, math.nan])
def test_a_time_that_is_no_number_is_a_dash(seconds):
    assert short_duration(seconds) == "-"
