"""Text about both sides of a split job, and about its possible divisions."""

from collections.abc import Iterator, Mapping
from typing import Any

from mindrlhf.configs.placement import GENERATOR_FLAG, SCORER_FLAG, TRAINER_FLAG
from mindrlhf.files.text import aligned
from mindrlhf.metrics.console import short_duration
from mindrlhf.units import size

Tried = Mapping[str, Any]
"""An `Outlook` as plain values."""


def exchange_line(exchanged: Mapping[str, int], takers: int) -> str:
    """Describe the bytes of `exchange.exchanged`.

    takers: number of ranks that train or score.
    """
    answers = exchanged["experiences"]
    each = f", {size(answers // takers)} each" if takers > 1 else ""
    scores = exchanged.get("scores")
    where = "to ranks that train" if scores is None else "to the others"
    back = "" if scores is None else f", and {size(scores)} of scores between these"
    return (
        f"between sides    in a step {size(exchanged['weights'])} of weights to ranks that generate, and about "
        f"{size(answers)} of answers {where}{each}{back}"
    )


def division_lines(figures: Mapping[str, Any]) -> Iterator[str]:
    """Make the table of divisions, and name the one with the shortest step.

    figures: `Divisions.figures`.
    """
    proposed = figures["proposed"]
    together = figures["colocated"]
    given = figures["given"]
    beside = figures["beside"]
    ranks = given["trainers"] + given["generators"]
    rows = [("train + generate", "a step", "train", "wait", "generate", "wait", "peak", "fits")]
    rows += [_cells(_named(one, figures), one) for one in figures["tried"]]
    rows.append(_cells(f"all {ranks + given['scorers']} do both", together))
    yield aligned(rows)
    yield from _verdict(figures, ranks)
    if beside and beside["fits"] and beside["step_seconds"] < given["step_seconds"]:
        steps = f"{short_duration(beside['step_seconds'])} in place of {short_duration(given['step_seconds'])}"
        yield f"scoring where answers are drawn (trainer.scoring_ranks=infer): a step of {steps} with {_numbers(given)}"
    if together and proposed and together["fits"] and together["step_seconds"] < proposed["step_seconds"]:
        flags = [TRAINER_FLAG, GENERATOR_FLAG, *([SCORER_FLAG] if given["scorers"] else [])]
        yield f"shorter still is no division, without {' and '.join(flags)}:"
        yield f"  {' '.join(together['arguments'])}"


def _verdict(figures: Mapping[str, Any], ranks: int) -> Iterator[str]:
    """Name the division with the shortest step of those that fit, and its arguments."""
    given = figures["given"]
    proposed = figures["proposed"]
    tried = len(figures["tried"])
    among = f"of {tried} possible with {ranks} ranks" if tried > 1 else f"the only one possible with {ranks} ranks"
    if proposed is None:
        yield f"division: none fits, {among}"
    elif proposed == given:
        yield f"division: the given {_numbers(given)} has the shortest step that fits, {among}"
    else:
        instead = f"in place of {short_duration(given['step_seconds'])}" if given["fits"] else "and fits"
        step = f"{short_duration(proposed['step_seconds'])} {instead}"
        yield f"division: {_numbers(proposed)} has the shortest step, {step}, {among}:"
        yield f"  {' '.join(proposed['arguments'])}"


def _named(one: Tried, figures: Mapping[str, Any]) -> str:
    """Write the numbers of a division's ranks, and its part in the comparison."""
    if one == figures["given"]:
        return f"{_numbers(one)}, given"
    return f"{_numbers(one)}, proposed" if one == figures["proposed"] else _numbers(one)


def _numbers(one: Tried) -> str:
    return f"{one['trainers']} + {one['generators']}"


def _cells(name: str, one: Tried | None) -> tuple[str, ...]:
    """Make a row of the table.

    one: None for a job that `train` would refuse.
    """
    if one is None:
        return (name, *["-"] * 6, "refused")
    sides = []
    for side in ("train", "infer"):
        sides += [short_duration(one["side_seconds"][side]), f"{one['idle'][side]:.0%}" if one["idle"] else "-"]
    return (name, short_duration(one["step_seconds"]), *sides, size(one["peak"]), "yes" if one["fits"] else "NO")
