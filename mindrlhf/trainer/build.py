"""Building of a GRPO trainer from a checked job."""

from contextlib import ExitStack

from mindrlhf.backend.comm.collectives import Collectives
from mindrlhf.backend.process.launch import World
from mindrlhf.configs.grpo import RewardSettings
from mindrlhf.environments.open import open_partner
from mindrlhf.evaluation.validation import open_validation
from mindrlhf.job import Job, Objects
from mindrlhf.model_roles import GENERATOR
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
    config, collectives = job.config, Collectives(world)
    checkpoint = continued_checkpoint(job, data, collectives)
    generating = Partition.of_yaml(job.infer, job.model, world.rank)
    scores = generating and generating.first_of_replica and not data.recorded
    rewards = open_rewards(config.reward, job.objects, data, stack) if scores else None
    partner = None if data.recorded else open_partner(config, job.tokenizer, generating, collectives, stack)
    forecast_s = preflight(job, collectives, data, rewards)
    if job.flags.enable_compile_cache:
        use_compile_cache(job.described(), config.kind, world, stack)
    run = Run(job, data, collectives, checkpoint, signals, StepReport)
    run.report.forecast_s = forecast_s
    if rewards and rewards.models:
        rewards.models.load(run.residency.add, run.timers)
    roles = {name: one for name, one in job.roles.items() if name != GENERATOR.name or not data.recorded}
    parts = open_parts(config, job.yamls, roles, collectives, data.max_positions, checkpoint, run.residency)
    credit = Credit(config, parts.policy.data_parallel)
    source: Source = RecordedRollouts(run, data.recorded)
    validation = None
    if generator := parts.get(GENERATOR.name):
        generate = Rollouts(config, job.tokenizer, data.longest_prompt, generator, rewards, run, partner)
        source = FreshRollouts(run, data.stream, generate, generator.data_parallel, StepSampling(config))
        held_out = partner if config.validation.environment else None
        validation = open_validation(
            config,
            job.objects,
            job.tokenizer,
            job.output,
            generator,
            data.problems,
            stack,
            held_out,
            data.total_steps,
        )
        if validation:
            run.residency.add(VALIDATION_CACHE, validation.evaluator.engine.cache.parameters, zeros=True)
    run.begin(parts, {**source.counters, "kl": credit.kl}, dict(source.blobs), stack)
    return GRPOLoop(config, source, parts, credit, run, validation)


def open_rewards(settings: RewardSettings, objects: Objects, data: TrainingData, stack: ExitStack) -> RewardRunner:
    """Start reward processes.

    Raises `UserError` for rows that lack a field that functions need. `stack` ends the processes.
    """
    rewards = stack.enter_context(RewardRunner(settings, objects.functions, data.total_steps))
    rewards.check_ground_truths(data.prompts, data.source)
    return rewards
