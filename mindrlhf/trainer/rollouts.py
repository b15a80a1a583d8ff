"""Generation and scoring of responses, the input of a step."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain

import numpy as np

from mindrlhf.checkpoint.tokenizer import stop_ids
from mindrlhf.configs.grpo import GRPOSettings
from mindrlhf.data.tokenizer import Tokenizer
from mindrlhf.phases import CACHE
from mindrlhf.rewards.runner import RewardRunner
from mindrlhf.rewards.samples import reward_samples
from mindrlhf.roles.generator import Generator
from mindrlhf.rollout.engine import Engine
from mindrlhf.rollout.partner import EnvironmentRewards, Partner
from mindrlhf.run.run import Run
from mindrlhf.shapes import round_responses, slot_count
from mindrlhf.types import Experience, Prompt, RolloutGroup, TokenValues


class Rollouts:
    """Generator of scored responses to this rank's prompts.

    rewards: None on ranks that do not score: another rank of their replica does. partner: of conversations. If the
    advantage needs it, the most probable response to each prompt is scored too.
    """

    def __init__(
        self,
        config: GRPOSettings,
        tokenizer: Tokenizer,
        longest_prompt: int,
        generator: Generator,
        rewards: RewardRunner | None,
        run: Run,
        partner: Partner | None = None,
    ):
        self._settings = config.rollout
        self._rewards = rewards
        self._run = run
        self._partner = partner
        self._decode = lambda ids: tokenizer.decode(list(ids), skip_special_tokens=True)
        greedy = self._settings.model_copy(update={"temperature": 0.0})
        # No engine has more slots than a round has responses.
        responses = round_responses(config, generator.data_parallel.size)
        slots = [slot_count(self._settings.max_slots, count) if count else 0 for count in responses]
        model = generator.partition.model
        self._engine, self._greedy = (
            Engine(
                model,
                generator.rollout_decoder,
                sampling,
                count,
                longest_prompt,
                stop_ids(tokenizer, model),
                config.seed,
                config.train.length_bucket,
                tokenizer.decode,
            )
            if count
            else None
            for sampling, count in zip((self._settings, greedy), slots, strict=True)
        )
        caches = [engine.cache.parameters for engine in (self._engine, self._greedy) if engine]
        run.residency.add(CACHE, chain.from_iterable(caches), zeros=True)

    def __call__(self, prompts: list[Prompt], step: int) -> list[Experience]:
        """Generate and score a group for each prompt, on ranks that score."""
        groups, own = self._generate(self._engine, prompts, self._settings.num_generations, step)
        greedy, more = self._generate(self._greedy, prompts, 1, step) if self._greedy else ([], ())
        return self._score(groups, greedy, [*own, *more], step) if self._rewards else []

    def _generate(
        self, engine: Engine, prompts: list[Prompt], samples: int, step: int
    ) -> tuple[list[RolloutGroup], EnvironmentRewards]:
        """Generate groups; returns them, and the partner's rewards if it has any."""
        run = self._run
        with run.timers("gen"), run.progress("generate", 0, "tokens") as advance:

            def drawn(tokens: int, total: int) -> None:
                advance(tokens, total)
                run.checkpointer.within_phase()  # may end the run by raising

            groups = engine.generate(prompts, samples, step, drawn, self._partner)
            own = self._partner.rewards() if self._partner else ()
            groups = with_tokens(groups, self._partner.tokens if self._partner else ())
        run.report.add_generation(engine.statistics)
        run.report.add_conversations(self._partner and self._partner.statistics, groups)
        return groups, own

    def _score(
        self, groups: list[RolloutGroup], greedy: list[RolloutGroup], own: EnvironmentRewards, step: int
    ) -> list[Experience]:
        """Score samples; a failed call leaves its sample unscored, is counted, and shown once.

        own: rewards of the environments, as in `reward_samples`.
        """
        with self._run.timers("reward"):
            samples = reward_samples(self._decode, [*groups, *greedy], self._settings.max_new_tokens, own)
            table = self._rewards.score(samples, step - 1)
        self._run.report.add_reward_table(table)
        ends = np.cumsum([len(group.rollouts) for group in groups])
        totals = np.split(table.totals, ends)
        by_function = {name: np.split(values, ends) for name, values in table.by_function.items()}
        notes = np.split(np.array(table.notes, object), ends)
        return [
            Experience(
                group,
                totals[i],
                {name: parts[i] for name, parts in by_function.items()},
                np.zeros(len(group.rollouts), np.float32),
                policy_step=step,
                notes=tuple(notes[i]) if any(notes[i]) else (),
                greedy_reward=float(totals[-1][i]) if greedy else None,
            )
            for i, group in enumerate(groups)
        ]


def with_tokens(groups: list[RolloutGroup], values: Sequence[TokenValues]) -> list[RolloutGroup]:
    """Add a partner's values at tokens to rollouts, in order, if there are any."""
    if not any(values):
        return groups
    rows = iter(values)
    return [
        replace(group, rollouts=tuple(rollout.with_values(next(rows)) for rollout in group.rollouts))
        for group in groups
    ]
