"""Generation and scoring of responses, the input of a step."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from mindrlhf.configs.grpo import RolloutSettings
from mindrlhf.metrics.progress import Progress
from mindrlhf.metrics.timer import Timers
from mindrlhf.rewards.process import Sample
from mindrlhf.rewards.runner import RewardRunner
from mindrlhf.rewards.table import RewardTable
from mindrlhf.rollout.engine import Engine
from mindrlhf.types import Experience, Prompt, Rollout, RolloutGroup


@dataclass
class Rollouts:
    """Generator of scored responses to this rank's prompts.

    greedy: the engine of the most probable response, whose reward is ReMax's baseline; None where nothing needs it.
    rewards: None on ranks that leave scoring to another one of their replica. decode: token ids -> text without special
    tokens. on_scored: called with each table of rewards. on_progress: called while it generates, and may end that by
    raising. on_generated: called with the tokens and the seconds of each generation.
    """

    settings: RolloutSettings
    engine: Engine
    greedy: Engine | None
    rewards: RewardRunner | None
    decode: Callable[[Sequence[int]], str]
    on_scored: Callable[[RewardTable], None]
    on_progress: Callable[[], None]
    on_generated: Callable[[int, float], None]
    timers: Timers
    progress: Progress

    def __call__(self, prompts: list[Prompt], step: int) -> list[Experience]:
        """Generate and score a group for each prompt, in order.

        Returns nothing on a rank that does not score.
        """
        groups = self._generate(self.engine, prompts, self.settings.num_generations, step)
        greedy = self._generate(self.greedy, prompts, 1, step) if self.greedy else []
        return self._score(groups, greedy, step)

    def _generate(self, engine: Engine, prompts: list[Prompt], samples: int, step: int) -> list[RolloutGroup]:
        count = len(prompts) * samples
        with self.timers("gen"), self.progress("generate", count, "responses") as advance:

            def finished(responses: int) -> None:
                advance(responses)
                self.on_progress()

            groups = engine.generate(prompts, samples, step, finished)
        self.on_generated(engine.statistics.tokens, engine.statistics.seconds)
        return groups

    def _score(self, groups: list[RolloutGroup], greedy: list[RolloutGroup], step: int) -> list[Experience]:
        """Score samples; a function that fails costs its sample, and is shown once.

        Failures are counted.
        """
        if self.rewards is None:
            return []
        with self.timers("reward"):
            every = [(group.prompt, rollout) for group in (*groups, *greedy) for rollout in group.rollouts]
            limit = self.settings.max_new_tokens
            samples = [reward_sample(self.decode, prompt, rollout, limit) for prompt, rollout in every]
            table = self.rewards.score(samples)
        self.on_scored(table)
        ends = np.cumsum([len(group.rollouts) for group in groups])
        totals = np.split(table.totals, ends)
        by_function = {name: np.split(values, ends) for name, values in table.by_function.items()}
        return [
            Experience(
                group,
                totals[i],
                {name: parts[i] for name, parts in by_function.items()},
                np.zeros_like(totals[i]),
                policy_step=step,
                greedy_reward=float(totals[-1][i]) if greedy else None,
            )
            for i, group in enumerate(groups)
        ]


def reward_sample(
    decode: Callable[[Sequence[int]], str], prompt: Prompt, rollout: Rollout, max_new_tokens: int
) -> Sample:
    """Build a reward function's inputs for a response.

    They are both texts, the task's fields, and lengths in tokens.
    """
    told = {"response_length": str(np.count_nonzero(rollout.sampled)), "max_new_tokens": str(max_new_tokens)}
    return decode(prompt.token_ids), decode(rollout.response_ids), {**prompt.fields, **told}
