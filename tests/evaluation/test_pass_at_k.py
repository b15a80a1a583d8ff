"""pass@k and maj@k against every draw counted one by one; comparisons against the textbook."""

import json
from dataclasses import replace
from itertools import combinations
from math import comb, nan

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mindrlhf.errors import UserError
from mindrlhf.evaluation.pass_at_k import (
    Answer,
    compare,
    evaluate,
    interval,
    ks,
    majority_at_k,
    overall,
    pass_at_k,
    read_answers,
    sign_test,
    turn_metrics,
    validation_metrics,
)
from mindrlhf.files.json import write_json_lines


def answer(problem, sample=0, score=1.0, voted="1", source="gsm8k", length=10, truncated=False) -> Answer:
    return Answer(problem, sample, source, "1 + 0?", "1", f"#### {voted}", score, voted, length, truncated)


def answers(table: list[list[int]], source="gsm8k") -> list[Answer]:
    """One row of 0 and 1 for each problem."""
    return [
        answer(problem, sample, float(score), str(score), source)
        for problem, row in enumerate(table)
        for sample, score in enumerate(row)
    ]


# --- pass@k ---


@pytest.mark.parametrize("n", range(1, 8))
def test_pass_at_k_is_the_share_of_draws_with_a_right_one(n):
    for right in range(n + 1):
        for k in range(1, n + 1):
            draws = [any(i < right for i in draw) for draw in combinations(range(n), k)]
            assert pass_at_k(n, right, k) == pytest.approx(np.mean(draws), abs=1e-12)


def test_pass_at_k_of_many():
    assert pass_at_k(200, 1, 100) == pytest.approx(0.5)
    assert pass_at_k(1000, 0, 999) == 0.0
    assert pass_at_k(1000, 1, 1000) == 1.0


# --- maj@k ---


def counted(votes, right, k) -> float:
    """Over every draw of k: the right share of each most frequent vote, the mean where several are equally frequent."""
    total = 0.0
    for draw in combinations(range(len(votes)), k):
        heard = [votes[i] for i in draw if votes[i] is not None]
        if heard:
            most = max(heard.count(value) for value in heard)
            winners = {value for value in heard if heard.count(value) == most}
            shares = [np.mean([r for v, r in zip(votes, right, strict=True) if v == winner]) for winner in winners]
            total += np.mean(shares)
    return total / comb(len(votes), k)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.sampled_from([None, "a", "b", "c", "d"]), st.booleans()), min_size=1, max_size=9))
def test_majority_is_that_of_all_draws(drawn):
    votes, right = [vote for vote, _ in drawn], [correct for _, correct in drawn]
    for k in range(1, len(votes) + 1):
        assert majority_at_k(votes, right, k) == pytest.approx(counted(votes, right, k), abs=1e-12), k


def test_majority_by_hand():
    votes, right = ["18", "18", "18", "7", "7", None], [True, True, True, False, False, False]
    assert majority_at_k(votes, right, 6) == 1.0
    assert majority_at_k(votes, right, 1) == pytest.approx(0.5)
    assert majority_at_k(["7", "18"], [False, True], 2) == pytest.approx(0.5)  # a tie
    assert majority_at_k([None, None], [False, False], 2) == 0.0
    assert majority_at_k(["1"] * 40 + ["2"] * 24, [True] * 40 + [False] * 24, 64) == 1.0


def test_a_right_majority_beats_single_answers():
    """Half of the answers right and the wrong ones spread: the majority is nearly always right."""
    votes, right = ["18"] * 32 + [str(i) for i in range(100, 132)], [True] * 32 + [False] * 32
    at = {k: majority_at_k(votes, right, k) for k in ks(64)}
    assert at[1] == pytest.approx(0.5)
    assert all(at[k] <= at[2 * k] + 1e-12 for k in (1, 2, 4, 8, 16, 32))
    assert at[8] > 0.95


# --- tables ---


def test_ks():
    assert [ks(n) for n in (1, 2, 3, 4, 8, 10)] == [[1], [1, 2], [1, 2, 3], [1, 2, 4], [1, 2, 4, 8], [1, 2, 4, 8, 10]]


def test_evaluate_by_source():
    given = [
        *answers([[1, 1, 0, 0], [0, 0, 0, 0], [1, 1, 1, 0]]),
        answer(0, 0, 0.3, "5", "countdown", 20, True),
        answer(0, 1, nan, None, "countdown", 40, False),
    ]
    values = evaluate(given)
    assert list(values) == ["gsm8k", "countdown"]
    assert values["gsm8k"] == pytest.approx(
        {
            "problems": 3,
            "pass@1": 5 / 12,
            "pass@2": (5 / 6 + 0 + 1) / 3,
            "maj@2": (0.5 + 0 + 0.75) / 3,
            "pass@4": 2 / 3,
            "maj@4": (0.5 + 0 + 1) / 3,
            "reward": 5 / 12,
            "length": 10,
            "truncated": 0,
            "unscored": 0,
        }
    )
    countdown = {"problems": 1, "pass@1": 0, "pass@2": 0, "maj@2": 0, "reward": 0.3, "length": 30}
    assert values["countdown"] == pytest.approx(countdown | {"truncated": 0.5, "unscored": 0.5})
    assert overall(values, "pass@1") == pytest.approx(5 / 16)


def test_verls_names():
    one = validation_metrics(answers([[1], [0], [0], [1]]))
    assert one == {
        "val/reward": 0.5,
        "val-core/gsm8k/acc/mean@1": 0.5,
        "val-aux/gsm8k/reward/mean@1": 0.5,
        "val-aux/gsm8k/response_length/mean": 10.0,
        "val-aux/gsm8k/response_length/clip_ratio": 0.0,
        "val-aux/gsm8k/unscored": 0.0,
    }
    four = validation_metrics(answers([[1, 0, 0, 0]]))
    assert four["val-core/gsm8k/acc/mean@4"] == 0.25
    assert four["val-core/gsm8k/acc/best@4/mean"] == 1.0
    assert four["val-core/gsm8k/acc/maj@4/mean"] == 0.0
    assert four["val-aux/gsm8k/acc/best@2/mean"] == 0.5
    assert "val-aux/gsm8k/acc/best@1/mean" not in four


def test_turns_of_conversations():
    """Over all sources, without the answers that are none; and nothing where there are none."""
    single, *talks = answers([[1], [0], [0]])
    talks = [replace(talk, num_turns=turns) for talk, turns in zip(talks, (2, 6), strict=True)]
    other = replace(answer(0, source="countdown"), num_turns=10)
    turns = {"num_turns/mean": 6.0, "num_turns/max": 10.0, "num_turns/min": 2.0}
    assert turn_metrics([single, *talks, other]) == turns
    metrics = validation_metrics([single, *talks, other])
    assert {name: value for name, value in metrics.items() if "turns" in name} == {
        f"val-aux/{name}": value for name, value in turns.items()
    }
    assert turn_metrics([single]) == {}


# --- comparisons ---


@pytest.mark.parametrize(
    ("right", "count", "low", "high"), [(0, 10, 0.0, 0.2775), (5, 10, 0.2366, 0.7634), (81, 263, 0.2553, 0.3662)]
)
def test_the_interval_of_a_share_is_wilson_s(right, count, low, high):
    """Values of textbooks; the last is Newcombe's example (1998)."""
    assert interval(right, count) == pytest.approx((low, high), abs=5e-5)


def test_sign_test():
    assert sign_test(0, 0) == 1.0
    assert sign_test(5, 5) == 1.0
    assert sign_test(10, 0) == pytest.approx(2 / 1024)
    assert sign_test(1, 9) == sign_test(9, 1) == pytest.approx(22 / 1024)


def test_mcnemar_of_a_known_table():
    """1,600 pairs, 150 and 86 of them discordant; p from the binomial, the interval from the normal approximation."""
    first = [[1]] * 794 + [[1]] * 150 + [[0]] * 86 + [[0]] * 570
    second = [[1]] * 794 + [[0]] * 150 + [[1]] * 86 + [[0]] * 570
    result = compare(answers(first), answers(second))
    assert (result.problems, result.wins, result.losses) == (1600, 86, 150)
    assert result.difference == pytest.approx(-64 / 1600)
    assert result.p == pytest.approx(2 * sum(comb(236, i) for i in range(87)) / 2**236)
    standard_error = np.sqrt((86 + 150) / 1600 - (64 / 1600) ** 2) / 40
    assert result.low == pytest.approx(-0.04 - 1.96 * standard_error, abs=1e-3)
    assert result.high == pytest.approx(-0.04 + 1.96 * standard_error, abs=1e-3)


def test_compare_pairs_by_problem():
    """The order does not matter, several answers count as their mean, and the same answers do not differ."""
    first, second = answers([[1, 0], [0, 0], [1, 1]]), answers([[1, 1], [0, 0], [1, 0]])
    result = compare(first, list(reversed(second)))
    assert (result.wins, result.losses, result.difference, result.p) == (1, 1, 0.0, 1.0)
    same = compare(first, first)
    assert (same.difference, same.low, same.high, same.p) == (0.0, 0.0, 0.0, 1.0)
    with pytest.raises(UserError, match="problem 2 of gsm8k was answered by one of the two only"):
        compare(first, first[:4])


# --- files ---


def test_answers_survive_a_file(tmp_path):
    unscored = answer(1, score=nan, voted=None, truncated=True)
    given = [answer(0), replace(answer(1), num_turns=4), unscored]
    write_json_lines(tmp_path / "a.jsonl", map(vars, given))
    read = read_answers(tmp_path / "a.jsonl")
    assert [vars(one) for one in read] == [*map(vars, given[:2]), pytest.approx(vars(unscored), nan_ok=True)]
    (tmp_path / "b.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(UserError, match=r"b.jsonl, line 1: is no answer"):
        read_answers(tmp_path / "b.jsonl")


@pytest.mark.parametrize(
    ("change", "wrong"),
    [
        ({"id": "1"}, "id"),
        ({"sample": True}, "sample"),
        ({"score": "1"}, "score"),
        ({"vote": 12}, "vote"),
        ({"length": 1.5}, "length"),
        ({"truncated": 1}, "truncated"),
        ({"num_turns": 2.0}, "num_turns"),
        ({"more": 1}, "more"),
    ],
)
def test_answers_of_another_kind_are_refused_by_line(tmp_path, change, wrong):
    good = {"id": 1, "sample": 0, "source": "t", "question": "q", "ground_truth": "2", "answer": "2"}
    good |= {"score": 1.0, "vote": "2", "length": 3, "truncated": False}
    path = tmp_path / "answers.jsonl"
    path.write_text(json.dumps(good) + "\n" + json.dumps(good | change) + "\n")
    with pytest.raises(UserError, match=rf"line 2: is no answer of an evaluation .see its {wrong}.; give"):
        read_answers(path)


def test_a_file_without_answers_is_refused(tmp_path):
    (tmp_path / "answers.jsonl").write_text("")
    with pytest.raises(UserError, match="holds no answers"):
        read_answers(tmp_path / "answers.jsonl")
