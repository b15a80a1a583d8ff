"""Accuracy from several answers per problem: pass@k, maj@k, and comparisons of models.

verl's names for the metrics. Expectations over the k answers that might have been drawn are exact, not resampled.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from math import comb, isnan, nan, sqrt
from pathlib import Path
from statistics import fmean
from typing import Annotated

import numpy as np
from pydantic import BeforeValidator, ConfigDict, ValidationError
from pydantic.dataclasses import dataclass

from mindrlhf.errors import UserError
from mindrlhf.files.json import read_json_lines

SOLVED = 1.0  # a problem is solved by an answer with this score or more
BOOTSTRAP_SAMPLES = 10_000
NORMAL_95 = 1.959964  # the 97.5% quantile of the normal distribution


@dataclass(frozen=True, config=ConfigDict(strict=True, extra="forbid"))
class Answer:
    """One answer to one problem.

    id: the problem's row in its dataset. sample: which of its answers. source: the dataset's task. score: the total
    reward, NaN without one. vote: text of the group of equal answers. length: tokens. truncated: it ended because the
    limit was hit. num_turns: turns of a conversation (`Rollout.num_turns`), None for a single answer.
    """

    id: int
    sample: int
    source: str
    question: str
    ground_truth: str
    answer: str
    score: Annotated[float, BeforeValidator(lambda score: nan if score is None else score)]
    vote: str | None
    length: int
    truncated: bool
    num_turns: int | None = None

    @property
    def solves(self) -> bool:
        """True for a right answer; one that could not be scored is wrong."""
        return self.score >= SOLVED


@dataclass(frozen=True)
class Comparison:
    """Comparison of two models on the same problems, B against A.

    problems: how many. difference: mean over problems of (B's share of right answers - A's share). low, high: its 95%
    interval, by resampling problems. wins, losses: problems on which B's share is larger or smaller. p: two-sided exact
    sign test over wins and losses; with one answer each it is McNemar's exact test.
    """

    problems: int
    difference: float
    low: float
    high: float
    wins: int
    losses: int
    p: float


def pass_at_k(answers: int, right: int, k: int) -> float:
    """Probability that one of k drawn is right (Chen et al. 2021, equation 1)."""
    return 1.0 - comb(answers - right, k) / comb(answers, k)


def majority_at_k(votes: Sequence[str | None], right: Sequence[bool], k: int) -> float:
    """Compute the probability that the most frequent vote of k drawn answers is right.

    Ties are broken by a fair draw; None is no vote. A vote is right in proportion to the right answers with this vote.
    """
    counts = Counter(value for value in votes if value is not None)
    solved = Counter(value for value, correct in zip(votes, right, strict=True) if correct and value is not None)
    total = 0.0
    for value, number in solved.items():
        others = tuple(sorted(count for other, count in counts.items() if other != value))
        total += number / counts[value] * _wins(counts[value], others, len(votes) - counts.total(), k)
    return total


@cache
def _wins(mine: int, others: tuple[int, ...], silent: int, k: int) -> float:
    """Compute the probability that a vote with `mine` answers wins among k drawn answers.

    For each number t of its own answers drawn: ways[d] counts the ways to draw d of the others, none more than t times.
    A tie with j others, each drawn t times, weighs 1 / (1 + j), the integral of tie**j from 0 to 1, for which the nodes
    are exact.
    """
    total = 0.0
    for t in range(1, min(mine, k) + 1):
        nodes, weights = np.polynomial.legendre.leggauss(k // (2 * t) + 1)
        for tie, weight in zip((nodes + 1) / 2, weights / 2, strict=True):
            ways = np.array([comb(silent, d) for d in range(k + 1)], np.float64)
            for count in others:
                own = [comb(count, d) * (tie if d == t else 1.0) for d in range(min(count, t) + 1)]
                ways = np.convolve(ways, own)[: k + 1]
            total += weight * comb(mine, t) * ways[k - t]
    return total / comb(mine + sum(others) + silent, k)


def by_problem(answers: Iterable[Answer]) -> dict[tuple[str, int], list[Answer]]:
    problems: dict[tuple[str, int], list[Answer]] = {}
    for answer in answers:
        problems.setdefault((answer.source, answer.id), []).append(answer)
    return problems


def evaluate(answers: Iterable[Answer]) -> dict[str, dict[str, float]]:
    """Compute metrics for each data source: name -> value.

    `problems`, `pass@1` (mean part of right answers), and with n answers to each `pass@k` and `maj@k` for k = 2, 4, ...
    and n, the smallest number if they differ; `reward` (mean score of the scored answers), `length` in tokens,
    `truncated`, `unscored` (parts of all answers).
    """
    sources: dict[str, list[list[Answer]]] = {}
    for (source, _), group in by_problem(answers).items():
        sources.setdefault(source, []).append(group)
    return {source: _evaluate_source(groups) for source, groups in sources.items()}


def _evaluate_source(groups: list[list[Answer]]) -> dict[str, float]:
    every = [answer for group in groups for answer in group]
    scored = [answer.score for answer in every if not isnan(answer.score)]
    values = {"problems": float(len(groups))}
    for k in ks(min(map(len, groups))):
        values[f"pass@{k}"] = fmean(pass_at_k(len(group), sum(a.solves for a in group), k) for group in groups)
        if k > 1:
            majority = (majority_at_k([a.vote for a in group], [a.solves for a in group], k) for group in groups)
            values[f"maj@{k}"] = fmean(majority)
    if scored:
        values["reward"] = fmean(scored)
    values["length"] = fmean(answer.length for answer in every)
    values["truncated"] = fmean(answer.truncated for answer in every)
    values["unscored"] = fmean(isnan(answer.score) for answer in every)
    return values


def validation_metrics(answers: Sequence[Answer]) -> dict[str, float]:
    """Compute `val-core/<source>/acc/mean@N` and, for N > 1, `best@N` and `maj@N`.

    The other k, the mean reward, length, truncated and unscored shares are `val-aux/...`: verl's two groups.
    `val/reward` is the mean over the sources, `val-aux/num_turns/*` are of all conversations.
    """
    metrics = {f"val-aux/{name}": value for name, value in turn_metrics(answers).items()}
    by_source = evaluate(answers)
    if rewards := [values["reward"] for values in by_source.values() if "reward" in values]:
        metrics["val/reward"] = fmean(rewards)
    for source, values in by_source.items():
        most = max(int(name.removeprefix("pass@")) for name in values if name.startswith("pass@"))
        for name, value in values.items():
            kind, _, k = name.partition("@")
            if kind == "pass" and k == "1":
                metrics[f"val-core/{source}/acc/mean@{most}"] = value
            elif k:
                group = "val-core" if int(k) == most else "val-aux"
                metrics[f"{group}/{source}/acc/{'best' if kind == 'pass' else kind}@{k}/mean"] = value
        if "reward" in values:
            metrics[f"val-aux/{source}/reward/mean@{most}"] = values["reward"]
        metrics[f"val-aux/{source}/response_length/mean"] = values["length"]
        metrics[f"val-aux/{source}/response_length/clip_ratio"] = values["truncated"]
        metrics[f"val-aux/{source}/unscored"] = values["unscored"]
    return metrics


def turn_metrics(answers: Iterable[Answer]) -> dict[str, float]:
    """Compute `num_turns/mean`, `max` and `min` of all conversations; nothing where there are none."""
    turns = [answer.num_turns for answer in answers if answer.num_turns is not None]
    if not turns:
        return {}
    summary = {"mean": fmean(turns), "max": float(max(turns)), "min": float(min(turns))}
    return {f"num_turns/{name}": value for name, value in summary.items()}


def ks(answers: int) -> list[int]:
    """List the reported k: 1, 2, 4, ... and the number of answers."""
    return [*(1 << i for i in range((answers - 1).bit_length())), answers]


def compare(first: Iterable[Answer], second: Iterable[Answer]) -> Comparison:
    """Compare the second model with the first; UserError when the problems differ."""
    shares = [
        {key: fmean(answer.solves for answer in group) for key, group in by_problem(side).items()}
        for side in (first, second)
    ]
    if shares[0].keys() != shares[1].keys():
        source, problem = min(shares[0].keys() ^ shares[1].keys())
        found = f"problem {problem} of {source} was answered by one of the two only"
        raise UserError(f"{found}; compare answers to the same problems.")
    differences = np.array([shares[1][key] - shares[0][key] for key in shares[0]])
    count = len(differences)
    rng = np.random.default_rng(0)
    resampled = [differences[rng.integers(count, size=count)].mean() for _ in range(BOOTSTRAP_SAMPLES)]
    low, high = np.quantile(resampled, (0.025, 0.975))
    wins = int((differences > 0).sum())
    losses = int((differences < 0).sum())
    return Comparison(count, float(differences.mean()), float(low), float(high), wins, losses, sign_test(wins, losses))


def interval(right: int, answers: int) -> tuple[float, float]:
    """Compute Wilson's 95% interval of a share of right answers."""
    share = right / answers
    spread = NORMAL_95**2 / answers
    middle = (share + spread / 2) / (1 + spread)
    half = sqrt(spread * (share * (1 - share) + spread / 4)) / (1 + spread)
    return middle - half, middle + half


def sign_test(wins: int, losses: int) -> float:
    """Compute the two-sided exact p of wins and losses under equal chances."""
    trials = wins + losses
    tail = sum(comb(trials, i) for i in range(min(wins, losses) + 1))
    return min(1.0, 2 * tail / 2**trials)


def read_answers(path: str | Path) -> list[Answer]:
    """Read a JSONL file of `Answer` rows; UserError for another kind of file."""
    answers = []
    advice = "give what `mindrlhf eval --output` wrote"
    for number, row in enumerate(read_json_lines(path), start=1):
        try:
            answers.append(Answer(**row))
        except ValidationError as error:
            wrong = error.errors()[0]["loc"][0]
            found = f"{path}, line {number}: is no answer of an evaluation (see its {wrong:.80})"
            raise UserError(f"{found}; {advice}.") from None
    if not answers:
        raise UserError(f"{path}: holds no answers; {advice}.")
    return answers


def overall(values: Mapping[str, Mapping[str, float]], name: str) -> float:
    """Compute the mean over all problems of a value by source."""
    problems = [source["problems"] for source in values.values()]
    return float(np.average([source[name] for source in values.values()], weights=problems))
