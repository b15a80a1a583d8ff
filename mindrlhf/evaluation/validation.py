"""Periodic evaluation of a training run on held-out problems."""

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from mindrlhf.configs.grpo import RewardFunctionSettings
from mindrlhf.evaluation.evaluator import Evaluator, reward_of, write_answers
from mindrlhf.evaluation.pass_at_k import validation_metrics
from mindrlhf.files.naming import TEXT, VALIDATION_FOLDER, step_path
from mindrlhf.job import Job
from mindrlhf.metrics.progress import Progress
from mindrlhf.rewards.runner import RewardRunner
from mindrlhf.roles.part import ModelPart
from mindrlhf.rollout.engine import Engine
from mindrlhf.rollout.partner import Partner
from mindrlhf.types import Prompt

# Rollouts of training and answers to a held-out problem of the same number and step do not share random numbers.
SEED_SHIFT = 1 << 32


@dataclass
class Validation:
    """Periodic evaluation in a run.

    every: steps between two evaluations, the last of `total` steps included; None for never. folder: of the answers as
    JSONL by step; None on ranks that write nothing.
    """

    evaluator: Evaluator
    every: int | None
    total: int
    folder: Path | None

    def due(self, step: int) -> bool:
        return self.every is not None and (step % self.every == 0 or step == self.total)

    def __call__(self, step: int) -> dict[str, float]:
        """Evaluate; returns verl's metrics (`validation_metrics`), the same on all ranks."""
        answers = self.evaluator(step)
        if self.folder:
            write_answers(step_path(self.folder, step, TEXT), answers)
        return validation_metrics(answers)


def open_validation(
    job: Job,
    generator: ModelPart,
    problems: list[Prompt],
    total: int,
    stack: ExitStack,
    partner: Partner | None = None,
) -> Validation | None:
    """Make the evaluation of held-out problems, divided by replicas; None without problems.

    total: steps of the run. Objects to close go on `stack`. partner: of the rollouts' conversations.
    """
    if not problems:
        return None
    config, axis, collectives = job.config, generator.data_parallel, generator.collectives
    rank = collectives.world.rank
    sampling = config.validation.completed(config.rollout)
    share = problems[axis.rank :: axis.size]
    name = sampling.reward or reward_of(problems, config.data.val_dataset, "set validation.reward")
    rewards = None
    if generator.partition.first_of_replica:
        settings = config.reward.model_copy(update={"functions": (RewardFunctionSettings(name=name),)})
        rewards = stack.enter_context(RewardRunner(settings))
        rewards.check_ground_truths(problems, config.data.val_dataset)
    responses, longest = len(share) * sampling.num_generations, max(len(prompt.token_ids) for prompt in problems)
    evaluator = Evaluator(
        engine=Engine.of_job(job, generator.decoder, sampling, responses, longest, config.seed + SEED_SHIFT),
        prompts=share,
        num_generations=sampling.num_generations,
        rewards=rewards,
        decode=lambda ids: job.tokenizer.decode(list(ids), skip_special_tokens=True),
        gather=lambda own: [answer for part in collectives.all_gather_object(own) for answer in part],
        progress=Progress(config.trainer.progress and rank == 0),
        partner=partner if sampling.environment else None,
    )
    folder = job.output / VALIDATION_FOLDER if rank == 0 else None
    return Validation(evaluator, config.trainer.test_freq, total, folder)
