"""Dynamic sampling: a step trains on groups with differing rewards.

DAPO (Yu et al. 2025, arXiv 2503.14476, section 3.2), in bounded rounds: surplus groups go to the next step; groups
without spread fill missing places, outside of the loss, so that a step keeps its size and division over ranks.
"""

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from mindrlhf.algorithms.advantages import differ
from mindrlhf.configs.grpo import GRPOSettings
from mindrlhf.records.formats import pack, unpack
from mindrlhf.records.rows import experiences_of, rows_of
from mindrlhf.rewards.table import weighted_sum
from mindrlhf.types import Experience, Prompt

_log = logging.getLogger(__name__)


class StepSampling:
    """Experiences of one step, collected in rounds; the same on every rank.

    prompts: see `records.rows.experiences_of`. surplus: groups with spread that were not needed, oldest first: they go
    into the next step.
    """

    def __init__(self, config: GRPOSettings, prompts: Mapping[int, Prompt] | None = None):
        self._prompts = prompts
        self._config = config
        self._size = config.data.prompts_per_step
        self.surplus: list[Experience] = []
        self._with_spread: list[Experience] = []
        self._without: list[Experience] = []
        self._rounds = 0
        self._drawn: Counter[int] = Counter()  # prompt id -> how many times the step has drawn it

    def snapshot(self) -> tuple[Experience, ...]:
        """Copy the surplus."""
        return tuple(self.surplus)

    def encode(self, surplus: tuple[Experience, ...]) -> bytes:
        """Encode a snapshot as bytes."""
        newest = max((e.policy_step for e in surplus), default=0)
        return pack(list(rows_of(newest, surplus)))

    def decode(self, content: bytes) -> None:
        """Restore the surplus from a snapshot's bytes."""
        self.surplus = [
            experience for _, group in experiences_of(unpack(content), self._prompts) for experience in group
        ]

    def begin(self) -> None:
        """Start a new step with the previous step's surplus."""
        self._with_spread = self.surplus
        self.surplus = []
        self._without = []
        self._rounds = 0
        self._drawn.clear()

    def wanted(self) -> int:
        """Count the prompts to draw next over all ranks; 0 ends the step."""
        settings = self._config.dynamic_sampling
        if not settings.enabled:
            return 0 if self._rounds else self._size
        if len(self._with_spread) >= self._size or self._rounds == settings.max_rounds:
            return 0
        return settings.prompts_per_round or self._size

    def numbered(self, prompts: Sequence[Prompt]) -> list[Prompt]:
        """Set `occurrence` of a round's prompts, over all ranks."""
        numbered = []
        for prompt in prompts:
            numbered.append(replace(prompt, occurrence=self._drawn[prompt.id]))
            self._drawn[prompt.id] += 1
        return numbered

    def add(self, experiences: list[Experience]) -> None:
        """Add the experiences of one round, of all ranks."""
        self._rounds += 1
        for experience in experiences:
            (self._without if only_fills(experience, self._config) else self._with_spread).append(experience)

    def take(self) -> tuple[list[Experience], Mapping[str, float]]:
        """Return the step's experiences, and metrics of sampling by name."""
        step, self.surplus = self._with_spread[: self._size], self._with_spread[self._size :]
        missing = self._size - len(step)
        if not self._config.dynamic_sampling.enabled:
            return step, {}
        if missing:
            left = f"the step trains on the other {len(step)}" if step else "the step has nothing to train on"
            found = f"{missing} of {self._size} groups have no spread"
            rounds = "one round" if self._rounds == 1 else f"{self._rounds} rounds"
            _log.warning(f"after {rounds} of generation {found}: {left}")
        return [*step, *self._without[:missing]], {
            "sampling/rounds": self._rounds,
            "sampling/dropped_groups": len(self._without),
            "sampling/surplus_groups": len(self.surplus),
            "sampling/missing": missing,  # places filled by groups without spread
        }


def has_spread(experience: Experience, config: GRPOSettings) -> bool:
    """Test for differing scores, of `dynamic_sampling.metric`, among responses with a score."""
    scores = experience.rewards
    by_function = experience.rewards_by_function
    metric = config.dynamic_sampling.metric
    if metric is not None:
        scores = by_function[metric]
    elif config.reward.overlong_factor:
        weights = [function.weight for function in config.reward.functions]
        *columns, _ = by_function.values()
        scores = np.array([weighted_sum(weights, row) for row in zip(*columns, strict=True)])
    return bool(differ(scores[np.isfinite(scores) & np.isfinite(experience.rewards)]))


def only_fills(experience: Experience, config: GRPOSettings) -> bool:
    """Test for a group that dynamic sampling keeps only to fill a step."""
    return config.dynamic_sampling.enabled and not has_spread(experience, config)


def mark_trained(experiences: list[Experience], config: GRPOSettings) -> list[Experience]:
    """Set `trained`: excludes unscored responses and, if configured, truncated ones and equal groups."""
    marked = []
    for experience in experiences:
        trained = np.isfinite(experience.rewards)
        if config.algorithm.mask_truncated:
            trained &= [rollout.finish_reason != "length" for rollout in experience.group.rollouts]
        marked.append(replace(experience, trained=trained & (not only_fills(experience, config))))
    return marked


def with_drawing_policy(experiences: list[Experience], step: int) -> list[Experience]:
    """Set old log-probs of groups from earlier steps: their drawing policy's."""
    return [e.with_tokens(old_log_probs=e.rows("policy_log_probs")) if e.policy_step < step else e for e in experiences]
