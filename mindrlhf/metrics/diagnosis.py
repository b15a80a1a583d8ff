"""Known problems of a run, recognised in its metrics, with usual remedies.

A rule looks at the values of one metric, step by step, and gives a hint or none. It is no proof: thresholds
are where people who have run such training begin to worry.
"""

import math
import statistics
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

AGAIN_AFTER = 50  # steps after which a hint whose trouble has stayed is shown again
KEPT = 200  # values of a metric that a rule sees, besides the first ones
FIRST = 5  # values that tell how a run began

NO_SPREAD_STEPS = 5
FEW_STEPS = 5
ENTROPY_SHARE, ENTROPY_LOW = 0.15, 0.2  # of what it began with, and nats per token
TRUNCATED_SHARE = 0.5
KL_HIGH, KL_GROWN, KL_FACTOR = 1.0, 0.1, 10.0  # nats per token; the second one with growth by the factor
MISMATCH = 0.05  # nats, mean over tokens of |difference of log-probs|
LOSS_SMALL = 1e-2


@dataclass(frozen=True)
class Course:
    """Values of a metric over a run.

    first: its first finite values. last: its recent ones, the newest at the end, NaN included.
    """

    first: Sequence[float]
    last: Sequence[float]

    def recent(self, count: int) -> float | None:
        """Mean of the last `count` values; None with fewer or non-finite ones."""
        values = list(self.last)[-count:]
        return statistics.fmean(values) if len(values) == count and all(map(math.isfinite, values)) else None


@dataclass(frozen=True)
class Rule:
    """Rule for one metric.

    looks_at: the metric; steps without it are ignored. says: its course -> words, or None. once: never again.
    """

    name: str
    looks_at: str
    says: Callable[[Course], str | None]
    once: bool = False


@dataclass(frozen=True)
class Hint:
    step: int
    rule: str
    text: str


def no_spread(course: Course) -> str | None:
    values = list(course.last)[-NO_SPREAD_STEPS:]
    if len(values) < NO_SPREAD_STEPS or min(values) < 1.0:
        return None
    return (
        f"in the last {NO_SPREAD_STEPS} steps all answers to each prompt scored the same, so nothing was learned: try "
        "`mindrlhf reward-check` on your data, problems that are sometimes solved, more rollout.num_generations, or a "
        "higher rollout.temperature"
    )


def entropy_collapse(course: Course) -> str | None:
    now = course.recent(FEW_STEPS)
    if now is None or len(course.first) < FIRST:
        return None
    began = statistics.fmean(course.first)
    if now >= ENTROPY_LOW or now >= ENTROPY_SHARE * began:
        return None
    return (
        f"entropy fell from {began:.2f} to {now:.3f} nats per token, so answers to a prompt are nearly the same: try a "
        "higher algorithm.epsilon_high (0.28), algorithm.entropy_coef above 0, preset:clip_cov, or a lower optimizer.lr"
    )


def truncated(course: Course) -> str | None:
    share = course.recent(FEW_STEPS)
    if share is None or share < TRUNCATED_SHARE:
        return None
    return (
        f"{share:.0%} of the answers were cut off in the last {FEW_STEPS} steps and mostly score as wrong: raise "
        "rollout.max_new_tokens, or see with `mindrlhf show` whether they end at all (the template and its end token)"
    )


def kl_running_away(course: Course) -> str | None:
    now = course.recent(3)
    earlier = [value for value in list(course.last)[:-3] if math.isfinite(value)]
    if now is None or len(earlier) < FIRST:
        return None
    usual = statistics.median(earlier)
    if now < KL_HIGH and (now < KL_GROWN or now < KL_FACTOR * usual):
        return None
    return (
        f"the KL to the reference model is {now:.2g} nats per token, {usual:.2g} before: the policy is running away; "
        "lower optimizer.lr, raise algorithm.beta, or see with `mindrlhf show` what it has found to please the reward"
    )


def mismatch(course: Course) -> str | None:
    now = course.recent(3)
    if now is None or now < MISMATCH:
        return None
    return (
        f"log-probs of generation and of training differ by {now:.2g} nats a token: they should be nearly equal; see "
        "that both model YAMLs have the same dtypes, or set rollout_correction.level=token"
    )


def skipped(course: Course) -> str | None:
    count = course.last[-1]
    if not count > 0:
        return None
    return (
        f"{count:g} updates of this step were skipped because the loss or its gradient was not finite: lower "
        "optimizer.lr, and look for rewards or log-probs that are not finite"
    )


def loss_near_zero(course: Course) -> str | None:
    if not all(abs(value) < LOSS_SMALL for value in course.last):
        return None
    return (
        "a policy loss near 0 is normal: advantages of a group sum to 0, and at the first update after generating "
        "the ratio is 1, so the value says nothing while its gradient trains; watch the reward (shown once)"
    )


RULES = (
    Rule("no_spread", "group/zero_std_fraction", no_spread),
    Rule("entropy_collapse", "actor/entropy", entropy_collapse),
    Rule("truncated", "response_length/clip_ratio", truncated),
    Rule("kl_running_away", "actor/kl_loss", kl_running_away),
    Rule("mismatch", "rollout_corr/log_prob_diff/mean", mismatch),
    Rule("skipped", "actor/skipped_updates", skipped),
    Rule("loss_near_zero", "actor/pg_loss", loss_near_zero, once=True),
)


class Diagnosis:
    """Observer of a run's steps that repeats no hint too soon."""

    def __init__(self, rules: Sequence[Rule] = RULES):
        self._rules = tuple(rules)
        self._first: dict[str, list[float]] = {rule.looks_at: [] for rule in rules}
        self._last: dict[str, deque[float]] = {rule.looks_at: deque(maxlen=KEPT) for rule in rules}
        self._said: dict[str, int] = {}

    def look(self, step: int, values: Mapping[str, float]) -> list[Hint]:
        """Return the hints of a step; steps come in order.

        None of them was given in the `AGAIN_AFTER` steps before.
        """
        for metric, last in self._last.items():
            if metric in values:
                last.append(values[metric])
                if len(self._first[metric]) < FIRST and math.isfinite(values[metric]):
                    self._first[metric].append(values[metric])
        hints = []
        for rule in self._rules:
            said = self._said.get(rule.name)
            if rule.looks_at not in values or (said is not None and (rule.once or step - said < AGAIN_AFTER)):
                continue
            text = rule.says(Course(self._first[rule.looks_at], self._last[rule.looks_at]))
            if text is not None:
                self._said[rule.name] = step
                hints.append(Hint(step, rule.name, text))
        return hints


def diagnose(rows: Sequence[Mapping[str, float]]) -> list[Hint]:
    """Return the hints of a whole run. rows: a dict per step, with `step`."""
    diagnosis = Diagnosis()
    return [hint for row in rows for hint in diagnosis.look(int(row["step"]), row)]
