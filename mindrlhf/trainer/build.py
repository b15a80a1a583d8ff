"""Building of a GRPO trainer from a checked job."""

from contextlib import ExitStack

from mindrlhf.backend.comm.collectives import Collectives
from mindrlhf.backend.process.launch import World
from mindrlhf.environments.open import open_partner
from mindrlhf.evaluation.validation import open_validation
from mindrlhf.job import Job
from mindrlhf.parallel.partition import Partition
from mindrlhf.phases import VALIDATION_CACHE
from mindrlhf.rewards.runner import RewardRunner
from mindrlhf.roles.parts import open_parts
from mindrlhf.rollout.scored import Rollouts
from mindrlhf.run.compile_cache import use_compile_cache
from mindrlhf.run.run import Run, continued_checkpoint
from mindrlhf.run.step_report import StepReport
from mindrlhf.run.stop_signals import StopSignals
from mindrlhf.run.training_data import TrainingData, read_training_data
from mindrlhf.trainer.credit import Credit
from mindrlhf.trainer.dynamic_sampling import StepSampling
from mindrlhf.trainer.grpo import GRPOLoop
from mindrlhf.trainer.preflight import preflight
from mindrlhf.trainer.sources import FreshRollouts, RecordedRollouts, Source


def build(job: Job, world: World, stack: ExitStack, signals: StopSignals) -> GRPOLoop:
    """Build the trainer of a job that `signals` may stop; `stack` closes everything."""
    data = read_training_data(job)
    collectives = Collectives(world)
    checkpoint = continued_checkpoint(job, data, collectives)
    rewards = open_rewards(job, data, collectives, stack)
    partner = None if data.recorded else open_partner(job, collectives, stack)
    forecast_s = preflight(job, collectives, data, rewards)
    use_compile_cache(job, world, stack)
    run = Run(job, data, collectives, checkpoint, signals, StepReport)
    run.report.forecast_s = forecast_s
    parts = open_parts(job, collectives, data.max_positions, checkpoint, run.residency, generates=not data.recorded)
    credit = Credit(job.config, parts.policy.data_parallel)
    source: Source = RecordedRollouts(run, data.recorded)
    validation = None
    if parts.generator:
        generate = Rollouts(job, data.longest_prompt, parts.generator, rewards, run, partner)
        source = FreshRollouts(run, data.stream, generate, parts.generator.data_parallel, StepSampling(job.config))
        held_out = partner if job.config.validation.environment else None
        validation = open_validation(job, parts.generator, data.problems, stack, held_out, data.total_steps)
        if validation:
            run.residency.add(VALIDATION_CACHE, validation.evaluator.engine.cache.parameters, zeros=True)
    run.begin(parts, {**source.counters, "kl": credit.kl}, dict(source.blobs), stack)
    return GRPOLoop(job.config, source, parts, credit, run, validation)


def open_rewards(job: Job, data: TrainingData, collectives: Collectives, stack: ExitStack) -> RewardRunner | None:
    """Start reward processes on the first rank of a replica; None for a replay.

    Raises `UserError` for rows that lack a field that functions need. `stack` ends the processes.
    """
    generating = Partition.of_yaml(job.infer, job.model, collectives.world.rank)
    if data.recorded or not (generating and generating.first_of_replica):
        return None
    rewards = stack.enter_context(RewardRunner(job.config.reward, job.objects.functions, data.total_steps))
    rewards.check_ground_truths(data.prompts, job.flags.mind_dataset_dir)
    return rewards
