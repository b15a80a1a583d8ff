"""The advantages of a step, over the groups of all ranks, so that none depends on how many ranks there are.

The methods are given sampled tokens only: for them a response has no others.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from mindrlhf.algorithms.advantages import RewardBatch, compute_advantages, gae_with_returns
from mindrlhf.configs.grpo import GRPOConfig
from mindrlhf.parallel.data_parallel import DataParallel
from mindrlhf.trainer.dynamic_sampling import has_spread
from mindrlhf.trainer.kl_term import KLTerm
from mindrlhf.types import Experience, put_back, taken


class StepAdvantages:
    """Turns rewards, and where they are used KL and values, into advantages.

    data_parallel: the training ranks' axis. kl: None without a KL term.
    """

    def __init__(self, config: GRPOConfig, data_parallel: DataParallel, kl: KLTerm | None):
        self._config, self._data_parallel, self._kl = config, data_parallel, kl
        algorithm = config.algorithm
        self._options = algorithm.options_of(algorithm.method)

    def __call__(self, everything: Sequence[Experience], own: Sequence[Experience]) -> list[Experience]:
        """`own` with advantages, and with the critic's targets where there is one.

        everything: the step's experiences of all ranks, in order. own: this rank's share of them, with log-probs.
        """
        batch = self._batch(everything, own)
        advantages = compute_advantages(self._config.algorithm.advantage, batch, **self._options)
        returns = gae_with_returns(batch, **self._options)[1] if batch.values is not None else [None] * len(everything)
        pairs = self._data_parallel.share(list(zip(advantages, returns, strict=True)))
        return [
            replace(
                e,
                advantages=put_back(given, e.sampled) if isinstance(given, list) else given,
                returns=targets and put_back(targets, e.sampled),
            )
            for e, (given, targets) in zip(own, pairs, strict=True)
        ]

    def _batch(self, everything: Sequence[Experience], own: Sequence[Experience]) -> RewardBatch:
        config = self._config
        token_rewards = values = None
        if self._kl and self._kl.in_reward:
            penalties = self._kl.values(own)
            token_rewards = self._gathered([[-self._kl.coefficient * row for row in rows] for rows in penalties])
        if config.algorithm.uses_critic:
            values = self._gathered([taken(e.values, e.sampled) for e in own])
        return RewardBatch(
            rewards=[self._rewards(e) for e in everything],
            lengths=[e.sampled_lengths for e in everything],
            token_rewards=token_rewards,
            values=values,
            greedy_rewards=[np.nan if e.greedy_reward is None else e.greedy_reward for e in everything],
            rewards_by_function=[e.rewards_by_function for e in everything],
            function_weights=self._weights(everything),
        )

    def _rewards(self, experience: Experience) -> np.ndarray:
        """Without those of groups that only fill a step, which must not move any statistic."""
        fills = self._config.dynamic_sampling.enabled and not has_spread(experience, self._config)
        return np.full_like(experience.rewards, np.nan) if fills else experience.rewards

    def _weights(self, everything: Sequence[Experience]) -> dict[str, float]:
        """Reward function, by the name in the experiences -> weight; in both places they have the settings' order."""
        names = everything[0].rewards_by_function if everything else ()
        functions = self._config.reward.all_functions
        return {name: function.weight for name, function in zip(names, functions, strict=False)}

    def _gathered(self, own: list) -> list:
        """What each rank has of its groups, of all ranks in order."""
        return [rows for part in self._data_parallel.gather(own) for rows in part]
