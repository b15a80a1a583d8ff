"""Periodic evaluation of a training run on held-out problems."""

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from mindrlhf.backend.comm.collectives import Collectives
from mindrlhf.checkpoint.tokenizer import stop_ids
from mindrlhf.configs.grpo import GRPOSettings, RewardFunctionSettings
from mindrlhf.configs.sft import SFTSettings
from mindrlhf.data.tokenizer import Tokenizer
from mindrlhf.evaluation.evaluator import Evaluator, reward_of, write_answers
from mindrlhf.evaluation.pass_at_k import validation_metrics
from mindrlhf.files.naming import TEXT, VALIDATION_FOLDER, step_path
from mindrlhf.job import Objects
from mindrlhf.memory.residency import Residency
from mindrlhf.metrics.progress import Progress
from mindrlhf.phases import VALIDATION_CACHE
from mindrlhf.rewards.runner import open_rewards
from mindrlhf.roles.part import ModelPart
from mindrlhf.rollout.engine import Engine
from mindrlhf.rollout.partner import Partner
from mindrlhf.shapes import slot_count
from mindrlhf.types import Prompt

# Separates random numbers of training rollouts and of answers to a held-out problem with the same id and step.
SEED_SHIFT = 1 << 32
ALL = "all"  # the reward functions of training


@dataclass
class Validation:
    """Evaluation in a run.

    folder: for the answers as JSONL by step; None on ranks that write nothing.
    """

    evaluator: Evaluator
    folder: Path | None

    def __call__(self, step: int) -> dict[str, float]:
        """Evaluate; returns verl's metrics (`validation_metrics`), the same on all ranks."""
        answers = self.evaluator(step)
        if self.folder:
            write_answers(step_path(self.folder, step, TEXT), answers)
        return validation_metrics(answers)

    def register(self, residency: Residency) -> None:
        """Let the cache of the answers leave memory in other phases."""
        residency.add(VALIDATION_CACHE, self.evaluator.engine.cache.parameters, zeros=True)


@dataclass(frozen=True)
class ToldValidation:
    """Evaluation on some ranks, whose metrics all ranks are told.

    own: None on the other ranks. root: a rank that has it.
    """

    own: Validation | None
    collectives: Collectives
    root: int

    def __call__(self, step: int) -> dict[str, float]:
        """Evaluate, or wait for the metrics; every rank calls it."""
        return self.collectives.broadcast_object(self.own(step) if self.own else None, self.root)


def open_validation(
    config: GRPOSettings | SFTSettings,
    objects: Objects,
    tokenizer: Tokenizer,
    output: Path,
    generator: ModelPart,
    problems: list[Prompt],
    stack: ExitStack,
    partner: Partner | None = None,
    total_steps: int = 0,
) -> Validation | None:
    """Open the evaluation of held-out problems, divided among replicas; None without problems.

    objects: of the calling program. output: folder of the run. Objects to close go on `stack`. partner: of
    conversations. total_steps: of the training.
    """
    if not problems:
        return None
    collectives = generator.collectives
    model = generator.partition.model
    settings = config.held_out
    sampling = settings.sampling
    share = problems[generator.data_parallel.rank :: generator.data_parallel.size]
    rewards = None
    judging = settings.reward
    if sampling.reward != ALL:
        name = sampling.reward or reward_of(problems, settings.source, "set validation.reward")
        judging = judging.model_copy(update={"functions": (RewardFunctionSettings(name=name),)})
    if generator.partition.first_of_replica:
        rewards = open_rewards(stack, judging, problems, settings.source, objects.functions, total_steps)
    slots = slot_count(settings.max_slots, len(share) * sampling.num_generations)
    longest = max(len(prompt.token_ids) for prompt in problems)
    evaluator = Evaluator(
        engine=Engine(
            model,
            generator.decoder,
            sampling,
            slots,
            longest,
            stop_ids(tokenizer, model),
            config.seed + SEED_SHIFT,
            config.train.length_bucket,
            tokenizer.decode,
            shows=partner is not None and partner.shows,
            opening=generator.open_session,
        ),
        prompts=share,
        num_generations=sampling.num_generations,
        rewards=rewards,
        decode=lambda ids: tokenizer.decode(list(ids), skip_special_tokens=True),
        gather=lambda own: [answer for part in collectives.all_gather_object(own) for answer in part],
        progress=Progress(config.trainer.progress and collectives.is_first),
        partner=partner,
    )
    folder = output / VALIDATION_FOLDER if collectives.is_first else None
    return Validation(evaluator, folder)
