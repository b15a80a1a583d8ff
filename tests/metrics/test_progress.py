import io

import pytest

from mindrlhf.metrics.progress import CompileLines, Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_in_a_log_a_line_every_few_seconds():
    stream, clock = io.StringIO(), Clock()
    with Progress(stream=stream, interval=5.0, clock=clock)("generate", 64, "responses") as advance:
        for _ in range(16):
            clock.now += 1.0
            advance(4)
    assert stream.getvalue().splitlines() == [
        "generate: 20/64 responses (31%), 4.00/s, 11s left",
        "generate: 40/64 responses (62%), 4.00/s, 6.0s left",
        "generate: 60/64 responses (94%), 4.00/s, 1.0s left",
    ]


def test_a_short_phase_prints_nothing_in_a_log():
    stream, clock = io.StringIO(), Clock()
    with Progress(stream=stream, clock=clock)("update", 3, "micro-batches") as advance:
        clock.now += 4.9
        advance(3)
    assert stream.getvalue() == ""


def test_a_total_that_shrinks():
    stream, clock = io.StringIO(), Clock()
    with Progress(stream=stream, clock=clock)("generate", 0, "tokens") as advance:
        for total in (10_000, 10_000, 4_000):
            clock.now += 2.5
            advance(500, total)
    assert stream.getvalue() == "generate: 1,000/10,000 tokens (10%), 200/s, 45s left\n"
    with Progress(stream=stream, clock=clock)("generate", 0, "tokens") as advance:
        clock.now += 10
        advance(1000, 1500)
    assert stream.getvalue().endswith("generate: 1,000/1,500 tokens (67%), 100/s, 5.0s left\n")


def test_compiling_counts_for_no_rate():
    stream, clock = io.StringIO(), Clock()
    with Progress(stream=stream, clock=clock, compile_s=lambda: min(clock.now, 30.0))("generate", 64, "x") as advance:
        clock.now += 30
        advance(0)
        clock.now += 5
        advance(10)
    assert stream.getvalue() == "generate: 10/64 x (16%), 2.00/s, 27s left\n"


def test_lines_of_compiling():
    stream, clock = io.StringIO(), Clock()
    announce = CompileLines(stream=stream, clock=clock)
    for number, seconds in ((1, 0.0), (2, 3.0), (3, 4.0), (4, 12.0)):
        clock.now += seconds
        announce(number, 5, clock.now)
    assert stream.getvalue().splitlines() == [
        "compiling graphs: 1 of 5, 0.0s",
        "compiling graphs: 3 of 5, 7.0s",
        "compiling graphs: 4 of 5, 19s",
    ]


def test_nothing_done_yet_is_no_division_by_zero():
    stream, clock = io.StringIO(), Clock()
    with Progress(stream=stream, clock=clock)("update", 3, "micro-batches") as advance:
        clock.now += 10
        advance(0)
    assert stream.getvalue() == ""


def test_on_a_terminal_a_bar_that_goes_away(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    stream = Terminal()
    with Progress(stream=stream)("generate", 64, "responses") as advance:
        advance(48)
    shown = stream.getvalue()
    assert "generate" in shown
    assert "48/64" in shown
    assert "responses" in shown
    assert shown.rstrip().endswith("\x1b[2K"), "the last thing written erases the bar's line"


@pytest.mark.parametrize("stream", [Terminal(), io.StringIO()])
def test_switched_off_writes_nothing(stream):
    clock = Clock()
    with Progress(enabled=False, stream=stream, clock=clock)("generate", 2, "responses") as advance:
        clock.now += 100
        advance(1)
    assert stream.getvalue() == ""
