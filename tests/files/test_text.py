"""Texts for people: lines that fit a terminal."""

import pytest

from mindrlhf.files.text import folded


@pytest.mark.parametrize("width", [30, 80])
def test_lines_break_between_words_at_the_terminals_width(monkeypatch, width):
    monkeypatch.setenv("COLUMNS", str(width))
    text = "  updates  1 in all, 1 per rank  algorithm.num_iterations 1 x updates_per_iteration 1\n\n  next"
    found = folded(text, 4).split("\n")
    assert all(len(line) <= width or " " not in line.strip() for line in found)
    assert " ".join(" ".join(found).split()) == " ".join(text.split())
    assert found[0].startswith("  updates  1")
    assert found[1].startswith("    ")
    assert found[-1] == "  next"


def test_outside_of_a_terminal_lines_stay(monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setattr("sys.__stdout__", None)
    assert folded("word " * 100, 4) == "word " * 100
