"""Known problems of a run, recognised in its metrics, with usual remedies (`hints.yaml`).

A hint is no proof: the thresholds are values at which people with experience of such training begin to worry.
"""

import math
import statistics
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources

import yaml

AGAIN_AFTER = 50  # steps after which a hint is shown again if its problem persists
KEPT = 200  # last values of a metric that a condition sees, in addition to the first ones
FIRST = 5  # number of values from which the beginning, or the usual value, is computed

RULES: Mapping[str, Mapping] = yaml.safe_load((resources.files(__package__) / "hints.yaml").read_text("utf-8"))


@dataclass(frozen=True)
class Course:
    """Values of a metric: its first finite ones, and the last."""

    steps: int
    first: list[float] = field(default_factory=list)
    last: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT))

    def add(self, value: float) -> None:
        self.last.append(value)
        if len(self.first) < FIRST and math.isfinite(value):
            self.first.append(value)

    @property
    def now(self) -> float:
        """Mean of the recent values; NaN with fewer or non-finite ones."""
        values = list(self.last)[-self.steps :]
        return statistics.fmean(values) if len(values) == self.steps and all(map(math.isfinite, values)) else math.nan

    @property
    def began(self) -> float:
        """Mean of the first values; NaN with fewer."""
        return statistics.fmean(self.first) if len(self.first) == FIRST else math.nan

    @property
    def usual(self) -> float:
        """Median of the finite values before the recent ones; NaN with few."""
        earlier = [value for value in list(self.last)[: -self.steps] if math.isfinite(value)]
        return statistics.median(earlier) if len(earlier) >= FIRST else math.nan


# Conditions for a rule's hint; false for NaN. Entropy and KL are in nats per token, log-probs in nats.
CONDITIONS: Mapping[str, Callable[[Course], bool]] = {
    "no_spread": lambda course: course.now >= 1.0,
    "entropy_collapse": lambda course: course.now < 0.2 and course.now < 0.15 * course.began,
    "truncated": lambda course: course.now >= 0.5,
    "kl_running_away": lambda course: (
        not math.isnan(course.usual) and (course.now >= 1.0 or course.now >= max(0.1, 10 * course.usual))
    ),
    "mismatch": lambda course: course.now >= 0.05,
    "skipped": lambda course: course.now > 0,
    "loss_near_zero": lambda course: all(abs(value) < 0.01 for value in course.last),
}


@dataclass(frozen=True)
class Hint:
    step: int
    rule: str
    text: str


class Diagnosis:
    """Observer of a run's steps that repeats no hint too soon."""

    def __init__(self) -> None:
        self._courses = {name: Course(rule["steps"]) for name, rule in RULES.items()}
        self._said: dict[str, int] = {}

    def look(self, step: int, values: Mapping[str, float]) -> list[Hint]:
        """Return the hints of a step, without hints given less than `AGAIN_AFTER` steps before."""
        hints = []
        for name, rule in RULES.items():
            if rule["metric"] not in values:
                continue
            course = self._courses[name]
            said = self._said.get(name)
            course.add(values[rule["metric"]])
            again = said is None or (not rule.get("once") and step - said >= AGAIN_AFTER)
            if again and CONDITIONS[name](course):
                self._said[name] = step
                hints.append(Hint(step, name, rule["text"].format(course=course)))
        return hints


def diagnose(rows: Sequence[Mapping[str, float]]) -> list[Hint]:
    """Return the problems of a whole run, without explanations.

    rows: a dict per step, with `step`.
    """
    diagnosis = Diagnosis()
    hints = [hint for row in rows for hint in diagnosis.look(int(row["step"]), row)]
    return [hint for hint in hints if not RULES[hint.rule].get("once")]
