"""Answers to held-out problems with their scores, in `mindrlhf eval` and during training."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mindrlhf.data.tasks import TASKS
from mindrlhf.data.tasks.verl import VERL
from mindrlhf.errors import UserError
from mindrlhf.evaluation.pass_at_k import Answer
from mindrlhf.evaluation.votes import votes
from mindrlhf.files.json import write_json_lines
from mindrlhf.metrics.progress import Progress
from mindrlhf.rewards.batches import Sample
from mindrlhf.rewards.runner import RewardRunner
from mindrlhf.rewards.samples import reward_samples
from mindrlhf.rewards.verl import shipped, source_of
from mindrlhf.rollout.engine import Engine
from mindrlhf.rollout.partner import EnvironmentRewards, Partner
from mindrlhf.types import Prompt, RolloutGroup


@dataclass
class Evaluator:
    """Evaluator of one model on one set of problems.

    prompts: this rank's share; ranks that generate together have the same. num_generations: answers to each prompt.
    rewards: their total is the score; None on ranks that leave scoring to another. decode: token ids -> text without
    special tokens. gather: this rank's answers -> all ranks' answers. partner: of conversations.
    """

    engine: Engine
    prompts: Sequence[Prompt]
    num_generations: int
    rewards: RewardRunner | None
    decode: Callable[[Sequence[int]], str]
    gather: Callable[[list[Answer]], list[Answer]]
    progress: Progress
    partner: Partner | None = None

    def __call__(self, step: int = 0) -> list[Answer]:
        """Generate every answer of all ranks, by problem; step: keys the random numbers."""
        with self.progress("evaluate", 0, "tokens") as advance:
            groups = self.engine.generate(self.prompts, self.num_generations, step, advance, self.partner)
        own = self.partner.rewards() if self.partner else ()
        return sorted(
            self.gather(self._scored(groups, own, step)), key=lambda answer: (answer.source, answer.id, answer.sample)
        )

    def _scored(self, groups: Sequence[RolloutGroup], own: EnvironmentRewards, step: int) -> list[Answer]:
        if self.rewards is None:
            return []
        every = [(group.prompt, rollout) for group in groups for rollout in group.rollouts]
        samples = reward_samples(self.decode, groups, self.engine.sampling.max_new_tokens, own)
        scores = self.rewards.score(samples, step).totals if samples else ()
        return [
            Answer(
                id=int(prompt.id),
                sample=int(rollout.sample_index),
                source=prompt.fields.get("data_source") or prompt.fields["task"],
                question=prompt.fields.get("question", ""),
                ground_truth=prompt.fields.get("ground_truth", ""),
                answer=sample.completion,
                score=float(score),
                vote=voted,
                length=int(np.count_nonzero(rollout.sampled)),
                truncated=rollout.finish_reason == "length",
                num_turns=rollout.num_turns if self.partner else None,
            )
            for (prompt, rollout), sample, score, voted in zip(
                every, samples, scores, self._votes(self.rewards, groups, samples), strict=True
            )
        ]

    @staticmethod
    def _votes(rewards: RewardRunner, groups: Sequence[RolloutGroup], samples: Sequence[Sample]) -> list[str | None]:
        """Group each problem's answers by the first comparing function."""
        name = next(iter(rewards.comparing), rewards.names[0])
        rest = iter(samples)
        return [
            vote
            for group in groups
            for vote in votes(name, group.prompt.fields, [next(rest)[:2] for _ in group.rollouts])
        ]


def reward_of(prompts: Sequence[Prompt], data: str | Path, advice: str) -> str:
    """Name the reward function of a dataset's task.

    Of rows in verl's columns it is that of their data sources, if all have the same. advice: another way, for messages.
    """
    task = prompts[0].fields["task"]
    if task not in TASKS:
        raise UserError(f"{data}: its task {task!r} has no reward function of its own; {advice}.")
    rewards = {shipped(source_of(prompt.fields)) for prompt in prompts} if task == VERL.name else set()
    return (rewards.pop() if len(rewards) == 1 else None) or TASKS[task].reward


def write_answers(path: Path, answers: Sequence[Answer]) -> None:
    write_json_lines(path, map(vars, answers))
