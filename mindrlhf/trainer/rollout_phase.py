"""Rollout phase of a step: prompts, answers, scores, and validation."""

from contextlib import ExitStack
from dataclasses import dataclass

from mindrlhf.backend.comm.collectives import Collectives
from mindrlhf.evaluation.validation import Validation, open_validation
from mindrlhf.job import Job
from mindrlhf.memory.residency import Residency
from mindrlhf.parallel.partition import Partition
from mindrlhf.phases import CACHE, VALIDATION_CACHE
from mindrlhf.rewards.runner import RewardRunner
from mindrlhf.roles.part import ModelPart
from mindrlhf.rollout.engine import Engine
from mindrlhf.rollout.open_engine import open_engine
from mindrlhf.rollout.scored import Rollouts
from mindrlhf.run.run import Run
from mindrlhf.run.training_data import TrainingData
from mindrlhf.shapes import round_responses
from mindrlhf.trainer.dynamic_sampling import StepSampling


@dataclass(frozen=True)
class RolloutPhase:
    """Objects that a step generates with.

    sampling: chooses groups. generate: answers this rank's prompts and scores the answers. validation: None without
    held-out problems.
    """

    sampling: StepSampling
    generate: Rollouts
    validation: Validation | None


def open_rewards(job: Job, data: TrainingData, collectives: Collectives, stack: ExitStack) -> RewardRunner | None:
    """Start the reward processes; None for a replay and on non-scoring ranks.

    Those leave scoring to another rank of their replica.
    Raises `UserError` for rows that lack a field of the functions. `stack` ends the processes.
    """
    generating = Partition.of_yaml(job.infer, job.model, collectives.world.rank)
    if data.recorded or not generating.first_of_replica:
        return None
    rewards = stack.enter_context(RewardRunner(job.config.reward))
    rewards.check_ground_truths(data.prompts, job.args.mind_dataset_dir)
    return rewards


def open_rollout_phase(
    job: Job, data: TrainingData, generator: ModelPart | None, rewards: RewardRunner | None, run: Run, stack: ExitStack
) -> RolloutPhase | None:
    """Open generation and scoring; None for a replay, which has no generator."""
    if generator is None:
        return None
    engine, greedy = open_engines(job, generator, data.longest_prompt)
    validation = open_validation(job, generator, data.problems, data.total_steps, stack)
    _register_caches(run.residency, CACHE, engine, greedy)
    _register_caches(run.residency, VALIDATION_CACHE, validation and validation.evaluator.engine)
    rollouts = Rollouts(
        job.config.rollout,
        engine,
        greedy,
        rewards,
        decode=lambda ids: job.tokenizer.decode(list(ids), skip_special_tokens=True),
        on_scored=run.report.add_reward_troubles,
        on_progress=run.checkpointer.within_phase,
        timers=run.timers,
        progress=run.progress,
    )
    return RolloutPhase(StepSampling(job.config), rollouts, validation)


def open_engines(job: Job, generator: ModelPart, longest_prompt: int) -> tuple[Engine, Engine | None]:
    """Open this rank's engine, and a greedy one where the advantage needs it.

    Neither has more slots than there are responses to a round.
    """
    config, decoder = job.config, generator.decoder
    responses, greedy_responses = round_responses(config, generator.data_parallel.size)
    greedy = config.rollout.model_copy(update={"temperature": 0.0})
    return (
        open_engine(job, decoder, config.rollout, responses, longest_prompt, config.seed),
        open_engine(job, decoder, greedy, greedy_responses, longest_prompt, config.seed) if greedy_responses else None,
    )


def _register_caches(residency: Residency, role: str, *engines: Engine | None) -> None:
    caches = [engine.cache for engine in engines if engine]
    residency.add(role, [p for cache in caches for p in (*cache.keys, *cache.values)], zeros=True)
