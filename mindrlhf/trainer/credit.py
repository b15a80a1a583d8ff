"""Credit of each sampled token: advantages over all ranks' groups, and the KL term."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from mindspore import Tensor

from mindrlhf.algorithms.advantages import RewardBatch, compute_advantages, gae_with_returns
from mindrlhf.algorithms.kl import kl_estimator, steered_coefficient
from mindrlhf.configs.algorithm import AlgorithmSettings
from mindrlhf.configs.grpo import GRPOSettings
from mindrlhf.parallel.data_parallel import DataParallel
from mindrlhf.rewards.form import environment
from mindrlhf.roles.policy_updates import policy_log_probs
from mindrlhf.trainer.dynamic_sampling import only_fills
from mindrlhf.types import Experience, put_back, taken


class Credit:
    """Advantages from rewards, KL and values, independent of the number of ranks.

    data_parallel: the training ranks' axis. kl: None without a KL term.
    """

    def __init__(self, config: GRPOSettings, data_parallel: DataParallel):
        self._config = config
        self._data_parallel = data_parallel
        self.kl = KLTerm(config.algorithm, data_parallel) if config.algorithm.beta > 0 else None

    def __call__(self, everything: Sequence[Experience], own: Sequence[Experience]) -> list[Experience]:
        """Add advantages, and the critic's returns if there is one, to `own`.

        everything: the step's experiences of all ranks, in order. own: this rank's experiences, with log-probs.
        """
        algorithm = self._config.algorithm
        batch = self._batch(everything, own)
        options = algorithm.options_of(algorithm.method)
        advantages = compute_advantages(algorithm.advantage, batch, **options)
        returns = gae_with_returns(batch, **options)[1] if algorithm.uses_critic else [None] * len(everything)
        pairs = self._data_parallel.share(list(zip(advantages, returns, strict=True)))
        return [_with_credit(e, *pair) for e, pair in zip(own, pairs, strict=True)]

    def _batch(self, everything: Sequence[Experience], own: Sequence[Experience]) -> RewardBatch:
        config = self._config
        token_rewards = None
        values = None
        ratios = None
        if self.kl and self.kl.in_reward:
            penalties = [[-self.kl.coefficient * row for row in rows] for rows in self.kl.values(own)]
            token_rewards = self._data_parallel.united(penalties)
        if config.algorithm.uses_critic:
            values = self._data_parallel.united([taken(e.rows("values"), e.sampled) for e in own])
        if config.algorithm.method.uses_teacher:
            ratios = self._data_parallel.united([teacher_log_ratios(e) for e in own])
        # Groups that only fill a step must not change any statistic.
        names = everything[0].rewards_by_function if everything else ()  # in the settings' order
        weights = dict(zip(names, (one.weight for one in config.reward.all_functions), strict=False))
        return RewardBatch(
            rewards=[e.rewards * np.nan if only_fills(e, config) else e.rewards for e in everything],
            lengths=[e.sampled_lengths for e in everything],
            token_rewards=token_rewards,
            values=values,
            teacher_log_ratios=ratios,
            greedy_rewards=[np.nan if e.greedy_reward is None else e.greedy_reward for e in everything],
            rewards_by_function=[e.rewards_by_function for e in everything],
            function_weights=weights,
            turn_rewards=_turn_rewards(everything, weights.get(environment.__name__, 0.0)),
        )


def _with_credit(e: Experience, given: np.ndarray | list[np.ndarray], returns: list[np.ndarray] | None) -> Experience:
    """Add a group's advantages and returns.

    given: float32[G], or as returns G arrays of the sampled tokens.
    """
    if isinstance(given, list):
        rows = put_back(given, e.sampled)
        given = np.array([row.mean() if row.size else 0.0 for row in given], np.float32)
    else:
        rows = tuple(np.full(length, value, np.float32) for length, value in zip(e.lengths, given, strict=True))
    arrays = {"advantages": rows}
    if returns:
        arrays["returns"] = put_back(returns, e.sampled)
    return replace(e.with_tokens(**arrays), advantages=given)


def teacher_log_ratios(experience: Experience) -> list[np.ndarray]:
    """Subtract the policy's log-probs of sampled tokens from the teacher's: G arrays float64."""
    pairs = zip(experience.rows("teacher_log_probs"), policy_log_probs(experience), strict=True)
    return taken([theirs.astype(np.float64) - ours for theirs, ours in pairs], experience.sampled)


def _turn_rewards(experiences: Sequence[Experience], weight: float) -> list[list[np.ndarray]] | None:
    """Place weighted rewards of turns: G arrays float64[sampled tokens] per group; None without any."""
    if not weight or not any("turn_rewards" in rollout.tokens for e in experiences for rollout in e.group.rollouts):
        return None
    return [[np.nan_to_num(weight * row) for row in taken(e.rows("turn_rewards"), e.sampled)] for e in experiences]


class KLTerm:
    """Penalty beta * KL(policy || reference) per token, with fixed or steered beta.

    in_reward: it is subtracted from the reward of each token instead of being a part of the loss.
    """

    def __init__(self, settings: AlgorithmSettings, data_parallel: DataParallel):
        self._target = settings.kl_target
        self._horizon = settings.kl_horizon
        self._data_parallel = data_parallel
        self._estimate = kl_estimator(settings.kl_estimator)
        self.coefficient = settings.beta
        self.in_reward = settings.kl_in_reward

    def state_dict(self) -> dict[str, float]:
        """Return the state for a resumed run."""
        return {"coefficient": self.coefficient}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Restore a steered coefficient; a fixed one comes from the settings."""
        if self._target is not None:
            self.coefficient = state["coefficient"]

    def values(self, experiences: Sequence[Experience]) -> list[list[np.ndarray]]:
        """Compute the KL of each sampled token, float32 in nats, per group and sample."""
        policy = [row for e in experiences for row in taken(policy_log_probs(e), e.sampled)]
        if not policy:
            return []
        reference = [row for e in experiences for row in taken(e.rows("reference_log_probs"), e.sampled)]
        flat, other = (np.concatenate(rows).astype(np.float32)[None] for rows in (policy, reference))
        values = self._estimate(Tensor(flat), Tensor(other), Tensor(np.ones_like(flat))).asnumpy()[0]
        rows = iter(np.split(values, np.cumsum([len(row) for row in policy])[:-1]))
        return [[next(rows) for _ in e.group.rollouts] for e in experiences]

    def steer(self, experiences: Sequence[Experience]) -> dict[str, float]:
        """Adapt the coefficient to a step's KL over all ranks; returns its metrics."""
        figures = {"actor/kl_coef": self.coefficient}
        if self.in_reward or self._target is not None:
            rows = [row for rows in self.values(experiences) for row in rows]
            sums = np.array([sum(float(row.sum()) for row in rows), sum(map(len, rows)), len(rows)])
            total, tokens, samples = self._data_parallel.sum(sums)
            kl = float(total / max(tokens, 1.0))
            if self.in_reward:
                figures["actor/reward_kl_penalty"] = kl
            if self._target is not None:
                self.coefficient = steered_coefficient(self.coefficient, kl, int(samples), self._target, self._horizon)
        return figures
