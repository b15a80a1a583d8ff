"""Questions about handwritten digits: answers worked out again, held-out digits, pictures of what rows say."""

import base64
from io import BytesIO

import numpy as np
import pytest
from PIL import Image

from mindrlhf.data.tasks import TASKS, digits
from mindrlhf.errors import UserError
from mindrlhf.rewards.gsm8k import gsm8k

ROWS = 60, 20  # to train with, held out


@pytest.fixture(scope="module")
def rows():
    pytest.importorskip("sklearn", reason="the digits are scikit-learn's: pip install scikit-learn")
    return digits.generate(sum(ROWS), 3, ROWS[0])


def pixels(row) -> np.ndarray:
    (image,) = row["images"]
    return np.asarray(Image.open(BytesIO(base64.b64decode(image.removeprefix("data:image/png;base64,")))))


def parts(row) -> tuple[list[int], int]:
    shown, _, result = row["answer"].partition(" #### ")
    return list(map(int, shown.split())), int(result)


def test_answers_are_right(rows):
    asked = {"sum": 0, "larger": 0, "How many sevens": 0}
    for row in rows:
        shown, result = parts(row)
        (kind,) = (kind for kind in asked if kind in row["question"])
        asked[kind] += 1
        right = {"sum": sum(shown), "larger": max(shown), "How many sevens": shown.count(7)}
        assert result == right[kind]
        assert pixels(row).shape == (digits.CELL * len(shown) // 2, digits.CELL * 2)
        assert row["question"].count("<image>") == 1
        problem = TASKS["digits"].parse(row)
        assert gsm8k(row["question"], row["answer"], {"ground_truth": problem.ground_truth}) == 1.0
    assert min(asked.values()) > 10


def test_the_same_seed_gives_the_same_rows(rows):
    assert digits.generate(sum(ROWS), 3, ROWS[0]) == rows
    assert digits.generate(sum(ROWS), 4, ROWS[0])[0] != rows[0]


def test_pictures_show_digits_of_their_values_and_held_out_ones_are_no_others(monkeypatch):
    """Each digit is a square of one brightness here: its own, by which it is known again."""
    numbered = [(number % 10, np.full((8, 8), (number + 4) * digits.WHITE / 255)) for number in range(250)]
    monkeypatch.setattr(digits, "_written_digits", lambda: list(numbered))
    monkeypatch.setattr(digits.random.Random, "uniform", lambda *_: 1.0)
    known = {number + 4: value for number, (value, _) in enumerate(numbered)}
    seen = []
    for row in digits.generate(400, 0, 300):
        picture, (shown, _) = pixels(row), parts(row)
        cells = [half for line in np.vsplit(picture, len(shown) // 2) for half in np.hsplit(line, 2)]
        levels = [int(cell.max()) for cell in cells]
        assert [known[level] for level in levels] == shown
        seen.append(set(levels))
    trained, held_out = set.union(*seen[:300]), set.union(*seen[300:])
    assert len(held_out) > 10
    assert not trained & held_out


def test_careless_demonstrations_repeat_the_smallest_digit(rows):
    demonstrated = digits.demonstrations(rows, careless_share=0.6, seed=1)
    careless = 0
    for row, (question, answer) in zip(rows, (one["messages"] for one in demonstrated), strict=True):
        assert question == {"role": "user", "content": row["question"]}
        shown, result = parts({"answer": answer["content"]})
        assert shown == parts(row)[0]
        assert result in (min(shown), parts(row)[1])
        careless += answer["content"] != row["answer"]
    assert 0.3 * len(rows) < careless < 0.7 * len(rows), "some smallest digits are right"
    assert [one["images"] for one in demonstrated] == [row["images"] for row in rows]
    assert digits.demonstrations(rows, careless_share=0.6, seed=1) == demonstrated


def test_unseen_problems_are_black(rows):
    for row, black in zip(rows, digits.unseen(rows), strict=True):
        assert {**black, "images": row["images"]} == row
        assert pixels(black).shape == pixels(row).shape
        assert not pixels(black).any()


def test_without_the_package_it_is_said(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "sklearn.datasets", None)
    with pytest.raises(UserError, match="pip install scikit-learn"):
        digits.generate(4, 0, 2)
