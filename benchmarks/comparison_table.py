"""Ratios, verdicts, and a table from the medians of all sides of a job."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from comparison_jobs import GROWTH, JOBS

OURS, FLOAT32 = "ours", "ours in float32"
DIFFERENCE = 0.04  # below it two times are the same


@dataclass(frozen=True)
class Outcome:
    """A job's sides. ours: our medians. peer: medians of the peer's fastest side, whose name is `fastest`.
    smallest_memory: MiB, the least over the peer's sides. float32: our medians in float32, if `ours` are bfloat16.
    """

    name: str
    ours: dict[str, Any]
    peer: dict[str, Any]
    fastest: str
    smallest_memory: float
    float32: dict[str, Any] | None = None

    def ratio(self, what: str) -> float:
        """Return ours / peer of `memory`, or per response token of `step`, `gen`, `logprob`, `train` with optimizer."""
        if what == "memory":
            return self.ours["memory"] / self.smallest_memory
        ours, theirs = (seconds(side, what) / side["completion_tokens"] for side in (self.ours, self.peer))
        return ours / theirs if theirs else float("nan")

    @property
    def missed(self) -> list[str]:
        """List the goals that are not reached, in words."""
        compared = [(what, self.ratio(what), goal) for what, goal in JOBS[self.name].goals.items()]
        return [f"{what} {ratio:.2f} > {goal:.2f}" for what, ratio, goal in compared if not ratio <= goal]

    @property
    def reached(self) -> bool:
        return not self.missed

    @property
    def seconds_per_token(self) -> tuple[float, float]:
        """Seconds of a step per response token: ours, the peer's."""
        return tuple(side["step"] / side["completion_tokens"] for side in (self.ours, self.peer))


def seconds(side: Mapping[str, Any], what: str) -> float:
    """Return a phase's seconds; training includes the optimizer, because not every side measures it apart."""
    return side["train"] + side["optim"] if what == "train" else side[what]


def as_outcome(name: str, sides: Mapping[str, dict[str, Any]]) -> Outcome:
    """Build a job's outcome from the medians of each side."""
    peers = {side: values for side, values in sides.items() if side not in (OURS, FLOAT32)}
    fastest = min(peers, key=lambda side: peers[side]["step"])
    smallest = min(values["memory"] for values in peers.values())
    return Outcome(name, sides[OURS], peers[fastest], fastest, smallest, sides.get(FLOAT32))


def growth_of(outcomes: Sequence[Outcome]) -> list[tuple[int, Outcome]]:
    """List (samples of a prompt, outcome) of the growth jobs among the outcomes."""
    by_name = {outcome.name: outcome for outcome in outcomes}
    return [(samples, by_name[f"growth-{samples}"]) for samples in GROWTH if f"growth-{samples}" in by_name]


def markdown(outcomes: Sequence[Outcome]) -> str:
    """Format the table and the notes below it."""
    heads = ["job", "ours s", "peer s", "step", "goal", "generate", "log-probs", "train", "memory", "MiB", "tokens/s"]
    heads += ["of ceiling", "building graphs s", "verdict"]
    lines = ["| " + " | ".join(heads) + " |", "| " + " | ".join("---" for _ in heads) + " |"]
    lines += ["| " + " | ".join(_cells(outcome)) + " |" for outcome in outcomes]
    lines += [
        "",
        "Ratios are ours / peer: step and phases, for each response token, against the peer's fastest side, memory "
        "against its smallest. MiB: our peak with the reward processes / the peer's smallest. tokens/s: our response "
        "tokens / generation. Graphs are built once, before the steps that count.",
    ]
    half = [outcome for outcome in outcomes if outcome.float32]
    if half:
        heads = ["job", "bfloat16 s", "float32 s", "step", "generate", "log-probs", "train", "memory", "peer's fastest"]
        lines += ["", "Ours in bfloat16 / ours in float32:", ""]
        lines += ["| " + " | ".join(heads) + " |", "| " + " | ".join("---" for _ in heads) + " |"]
        lines += ["| " + " | ".join(_half_cells(outcome)) + " |" for outcome in half]
    points = growth_of(outcomes)
    if len(points) > 1:
        (fewest, first), (most, last) = points[0], points[-1]
        change = last.seconds_per_token[0] / first.seconds_per_token[0]
        said = "does not grow" if change <= 1 + DIFFERENCE else "grows"
        lines += [
            "",
            f"From {fewest} to {most} samples of a prompt our time for each response token {said}: {change:.2f}x.",
        ]
    return "\n".join(lines) + "\n"


def _cells(outcome: Outcome) -> list[str]:
    job, ours = JOBS[outcome.name], outcome.ours
    goal = job.goals.get("step")
    share = ours["share_of_ceiling"]["step"]
    return [
        f"{outcome.name}: {job.what}",
        f"{ours['step']:.3f}",
        f"{outcome.peer['step']:.3f}",
        f"**{outcome.ratio('step'):.2f}**",
        "" if goal is None else f"{goal:.2f}",
        *(f"{outcome.ratio(what):.2f}" for what in ("gen", "logprob", "train", "memory")),
        f"{ours['memory']:,.0f} / {outcome.smallest_memory:,.0f}",
        f"{ours['gen_tok_s']:,.0f}",
        "" if share is None else f"{share:.0%}",
        f"{ours['compile_total_s']:.1f}",
        "; ".join(outcome.missed) or ("reached" if job.goals else ""),
    ]


def _half_cells(outcome: Outcome) -> list[str]:
    """Format our two sides, and the name of the peer's fastest."""
    ours, plain = outcome.ours, outcome.float32
    ratios = {what: seconds(ours, what) / seconds(plain, what) for what in ("step", "gen", "logprob", "train")}
    numbers = {**ratios, "memory": ours["memory"] / plain["memory"]}
    steps = (f"{side['step']:.3f}" for side in (ours, plain))
    return [outcome.name, *steps, *(f"{ratio:.2f}" for ratio in numbers.values()), outcome.fastest]
