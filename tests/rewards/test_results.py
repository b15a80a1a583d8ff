"""Results of reward functions: numbers, and what stands beside them; one bad value costs one sample."""

import json
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
from step_parts import experience

from mindrlhf.records.formats import pack, unpack
from mindrlhf.records.rows import experiences_of, rows_of, text_row
from mindrlhf.rewards.batches import Logged
from mindrlhf.rewards.process import Reply
from mindrlhf.rewards.results import Outcome, outcome, outcomes
from mindrlhf.rewards.table import build_table

RIGHT = [1.0, 0.0, 1.0]


def converted(returned):
    return outcomes(returned, 3, Logged(3))


@pytest.mark.parametrize(
    "returned",
    [
        RIGHT,
        tuple(RIGHT),
        np.array(RIGHT, np.float32),
        np.array(RIGHT)[:, None],
        [True, False, True],
        np.array(RIGHT, bool),
        (value for value in RIGHT),
        [Fraction(1), Decimal(0), np.float16(1)],
        [{"score": np.int64(value), "length": None} for value in RIGHT],
    ],
)
def test_forms_of_a_batch(returned):
    found = converted(returned)
    assert [one.score for one in found] == RIGHT
    assert not any(one.error or one.details for one in found)


class Raises:
    def __float__(self):
        raise RuntimeError("no")


@pytest.mark.parametrize(
    "bad", [float("nan"), -float("inf"), "0.5", np.array([0.0, 1.0]), 10**400, 1j, [1.0], b"1", object(), Raises(), {}]
)
def test_one_bad_value_costs_one_sample(bad):
    first, second, third = converted([1.0, bad, None])
    assert (first, third) == (Outcome(1.0), Outcome())
    assert second.score is None
    assert second.error
    with pytest.raises(ValueError, match=r"not a number|finite|without 'score'"):
        outcome(bad)
    with pytest.raises(ValueError, match="'score' is"):
        outcome({"score": bad})


@pytest.mark.parametrize("returned", [None, 1.0, "abc", {"score": 1.0}, {1.0, 0.0, 0.5}, [1.0, 0.0]])
def test_results_that_are_no_list_of_values(returned):
    with pytest.raises(ValueError, match=r"should return a list of 3 numbers|of 2 values for 3 completions"):
        converted(returned)


def test_what_stands_beside_a_score():
    """verl's own functions return texts; a value without a number is no reason to lose the score."""
    given = {"score": 1.0, "acc": True, "pred": "42", "none": None, "ratio": np.float32(0.5), "nan": float("nan")}
    given |= {"steps": [1, {"a": "é"}], "object": {1}, "half": "\ud800", "long": "x" * 5000, "huge": 10**400, 7: "key"}
    score, details, error = outcome(given)
    assert (score, error) == (1.0, None)
    assert {name: value for name, value in details.items() if isinstance(value, float)} == {"acc": 1.0, "ratio": 0.5}
    texts = {name: value for name, value in details.items() if isinstance(value, str)}
    assert len(texts.pop("long")) == 2000
    assert len(texts.pop("huge")) < 500
    assert texts == {
        "pred": "42",
        "nan": "NaN",
        "steps": '[1, {"a": "é"}]',
        "object": "{1}",
        "half": "?",
        "7": "key",
    }
    assert json.dumps(texts).encode()


def test_texts_go_to_the_records_and_numbers_to_the_metrics():
    replies = [Reply(1.0, {"pred": "42", "acc": 1.0}), Reply(0.0, {"acc": 0.0})]
    table = build_table([1.0], {"f": replies}, scoring=1)
    assert table.components["f"]["acc"].tolist() == [1, 0]
    assert list(table.components["f"]) == ["acc"]
    assert table.notes == [{"f": {"pred": "42"}}, {}]
    one = experience(1, [1.0, 0.0], notes=tuple(table.notes))
    stored = list(rows_of(1, [one, experience(2, [1.0, 0.0])], lambda ids: "text"))
    assert [text_row(row).get("reward_notes") for row in stored] == [{"f": {"pred": "42"}}, None, None, None]
    [(_, [back, plain])] = experiences_of(unpack(pack(stored)))
    assert (back.notes, plain.notes) == (one.notes, ())


def test_a_logged_metric_is_of_every_sample():
    logged = Logged(2)
    logged.log_metric("a", 1)
    logged.log_metric("a", np.float32(2))
    logged.log_extra("b", ["x", "y"])
    found = outcomes([{"score": 1.0, "a": 9.0}, None], 2, logged)
    assert [one.details for one in found] == [{"a": 9.0, "b": "x"}, {"a": 1.5, "b": "y"}]
