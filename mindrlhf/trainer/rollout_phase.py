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
    """Objects that a step generates with. validation: None without held-out problems."""

    sampling: StepSampling
    generate: Rollouts
    validation: Validation | None


def open_rewards(job: Job, data: TrainingData, collectives: Collectives, stack: ExitStack) -> RewardRunner | None:
    """Start reward processes on the first rank of a replica; None for a replay.

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
    config, decoder = job.config, generator.decoder
    # No engine has more slots than there are responses to a round; a greedy one where the advantage needs it.
    responses, greedy_responses = round_responses(config, generator.data_parallel.size)
    engine = open_engine(job, decoder, config.rollout, responses, data.longest_prompt, config.seed)
    greedy = None
    if greedy_responses:
        sampling = config.rollout.model_copy(update={"temperature": 0.0})
        greedy = open_engine(job, decoder, sampling, greedy_responses, data.longest_prompt, config.seed)
    validation = open_validation(job, generator, data.problems, data.total_steps, stack)
    _register_caches(run.residency, CACHE, engine, greedy)
    _register_caches(run.residency, VALIDATION_CACHE, validation and validation.evaluator.engine)
    rollouts = Rollouts(
        config.rollout,
        engine,
        greedy,
        rewards,
        decode=lambda ids: job.tokenizer.decode(list(ids), skip_special_tokens=True),
        on_scored=run.report.add_reward_troubles,
        on_progress=run.checkpointer.within_phase,
        on_generated=run.report.add_generation,
        timers=run.timers,
        progress=run.progress,
    )
    return RolloutPhase(StepSampling(job.config), rollouts, validation)


def _register_caches(residency: Residency, role: str, *engines: Engine | None) -> None:
    caches = [engine.cache for engine in engines if engine]
    residency.add(role, [p for cache in caches for p in (*cache.keys, *cache.values)], zeros=True)
