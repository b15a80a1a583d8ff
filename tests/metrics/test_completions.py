import io

import numpy as np
import pytest

from mindrlhf.metrics.completions import print_best_and_worst
from mindrlhf.types import Experience, Prompt, Rollout, RolloutGroup


def experience(number: int, texts: list[str], rewards: list[float], **fields: str) -> Experience:
    """A group whose token ids are the characters of its texts."""
    rollouts = tuple(Rollout(number, i, ids(text), "eos", 0, {}) for i, text in enumerate(texts))
    prompt = Prompt(number, ids(f"<prompt {number}>"), fields)
    return Experience(RolloutGroup(prompt, rollouts), np.float32(rewards), {}, np.zeros(len(texts)), 1)


def ids(text: str) -> np.ndarray:
    return np.array(list(map(ord, text)), np.int32)


def shown(*experiences: Experience) -> list[str]:
    stream = io.StringIO()
    print_best_and_worst(5, experiences, lambda ids: "".join(map(chr, ids)), stream)
    return [line.rstrip() for line in stream.getvalue().splitlines()]


def test_of_the_group_that_differs_most(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    dull = experience(3, ["same", "same"], [1.0, 1.0])
    spread = experience(
        7, ["so\n  9", "17!", "none"], [0.25, 1.0, np.nan], question="9 and\n8?", ground_truth="17", task="t"
    )
    assert shown(dull, spread) == [
        "  step 5, prompt 7  9 and 8?",
        "          expected  17",
        " best, reward 1.00  17!",
        "worst, reward 0.25  so 9",
    ]
    assert shown(dull)[0] == "  step 5, prompt 3  <prompt 3>"


def test_nothing_without_a_reward():
    assert shown() == shown(experience(1, ["a"], [np.nan])) == []


@pytest.mark.parametrize("columns", [40, 80, 100, 200])
@pytest.mark.parametrize("letter", ["x ", "x", "字", "\x1b[2J"])
def test_long_texts_are_a_few_lines_of_the_terminal(monkeypatch, columns, letter):
    from rich.cells import cell_len

    monkeypatch.setenv("COLUMNS", str(columns))
    lines = shown(experience(1, [f"begins {letter * 4000} ends", "b"], [1.0, 0.0]))
    assert max(map(cell_len, lines)) <= min(100, columns)
    assert len(lines) <= 8 + 3 * (letter == "字")
    text = " ".join(lines)
    assert "begins" in text
    assert "ends" in text
    assert all(line.isprintable() for line in lines)
