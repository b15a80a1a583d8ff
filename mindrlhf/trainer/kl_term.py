"""The KL term of a run: its coefficient, and its values where it is part of the reward."""

from collections.abc import Mapping, Sequence

import numpy as np
from mindspore import Tensor

from mindrlhf.algorithms.kl import kl_estimator
from mindrlhf.algorithms.kl_controller import AdaptiveKLController, FixedKLController
from mindrlhf.configs.algorithm import AlgorithmSettings
from mindrlhf.parallel.data_parallel import DataParallel
from mindrlhf.types import Experience, taken


class KLTerm:
    """beta * KL(policy || reference), per token, with a beta that is fixed or steered.

    controller: has the coefficient, which a resumed run has to begin with. in_reward: subtracted from the reward of
    each token instead of being a part of the loss.
    """

    def __init__(self, settings: AlgorithmSettings, data_parallel: DataParallel):
        self.in_reward = settings.kl_in_reward
        self._data_parallel = data_parallel
        self._estimate = kl_estimator(settings.kl_estimator)
        self.controller: FixedKLController | AdaptiveKLController = FixedKLController(settings.beta)
        if settings.kl_target is not None:
            self.controller = AdaptiveKLController(settings.beta, settings.kl_target, settings.kl_horizon)

    @property
    def coefficient(self) -> float:
        return self.controller.coefficient

    def state_dict(self) -> dict[str, float]:
        """What a resumed run goes on with."""
        return {"coefficient": self.coefficient}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Go on from `state_dict`; a coefficient that is not steered stays that of the settings."""
        if isinstance(self.controller, AdaptiveKLController):
            self.controller.coefficient = state["coefficient"]

    def values(self, experiences: Sequence[Experience]) -> list[list[np.ndarray]]:
        """Per group, per sample: float32 in nats of each sampled token, of the policy that started the step."""
        policy = [row for e in experiences for row in taken(policy_log_probs(e), e.sampled)]
        if not policy:
            return []
        reference = [row for e in experiences for row in taken(e.reference_log_probs, e.sampled)]
        flat, other = (np.concatenate(rows).astype(np.float32)[None] for rows in (policy, reference))
        values = self._estimate(Tensor(flat), Tensor(other), Tensor(np.ones_like(flat))).asnumpy()[0]
        rows = iter(np.split(values, np.cumsum([len(row) for row in policy])[:-1]))
        return [[next(rows) for _ in e.group.rollouts] for e in experiences]

    def steer(self, experiences: Sequence[Experience]) -> dict[str, float]:
        """Adapts the coefficient to a step's KL per token, over all ranks; returns what the step had, by metric name.

        experiences: this rank's, with log-probs.
        """
        figures = {"actor/kl_coef": self.coefficient}
        if not (self.in_reward or isinstance(self.controller, AdaptiveKLController)):
            return figures
        rows = [row for rows in self.values(experiences) for row in rows]
        sums = np.array([sum(float(row.sum()) for row in rows), sum(map(len, rows)), len(rows)])
        total, tokens, samples = self._data_parallel.sum(sums)
        kl = float(total / max(tokens, 1.0))
        self.controller.update(kl, int(samples))
        return {**figures, "actor/reward_kl_penalty": kl} if self.in_reward else figures


def policy_log_probs(experience: Experience) -> tuple[np.ndarray, ...]:
    """G arrays float32[R] of the policy that started the step: the train graph's where they are there, else the
    engine's of the same distribution.
    """
    if experience.old_log_probs is not None:
        return experience.old_log_probs
    return tuple(rollout.policy_log_probs for rollout in experience.group.rollouts)
