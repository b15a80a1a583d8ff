"""Metrics of how old the weights are that drew what a step trains on."""

from collections.abc import Sequence

import numpy as np

from mindrlhf.types import Experience


def ages(experiences: Sequence[Experience], step: int) -> dict[str, float]:
    """Measure by how many steps the weights that drew groups and tokens are older.

    A group is as old as its first tokens. `sample/stale_tokens` counts tokens that older weights drew than those that a
    step begins with; `sample/trajectory_spans_*` are the steps over which an answer was drawn.
    """
    found = [step - experience.policy_step for experience in experiences] or [0]
    drawn = [_policy_steps(e, place) for e in experiences for place in range(len(e.group.rollouts))]
    spans = [int(steps.max() - steps.min()) + 1 for steps in drawn if len(steps)] or [1]
    return {
        "sample/staleness_mean": sum(found) / len(found),
        "sample/staleness_max": float(max(found)),
        "sample/stale_tokens": float(sum(np.count_nonzero(steps < step) for steps in drawn)),
        "sample/trajectory_spans_mean": sum(spans) / len(spans),
        "sample/trajectory_spans_max": float(max(spans)),
    }


def _policy_steps(experience: Experience, place: int) -> np.ndarray:
    """Return the step of each sampled token's weights: int32[n]."""
    rollout = experience.group.rollouts[place]
    steps = rollout.row("policy_steps")[rollout.sampled]
    return np.where(steps > 0, steps, experience.policy_step)
