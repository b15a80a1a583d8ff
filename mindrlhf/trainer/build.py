"""Building of a GRPO trainer from a checked job."""

from contextlib import ExitStack

from mindrlhf.backend.comm.collectives import Collectives
from mindrlhf.backend.process.launch import World
from mindrlhf.environments.open import open_partner
from mindrlhf.evaluation.validation import open_validation
from mindrlhf.job import Job
from mindrlhf.model_roles import GENERATOR
from mindrlhf.parallel.partition import Partition
from mindrlhf.phases import VALIDATION_CACHE
from mindrlhf.rewards.runner import open_rewards
from mindrlhf.roles.parts import open_parts
from mindrlhf.run.compile_cache import use_compile_cache
from mindrlhf.run.run import Run, continued_checkpoint
from mindrlhf.run.step_report import StepReport
from mindrlhf.run.stop_signals import StopSignals
from mindrlhf.run.training_data import read_training_data
from mindrlhf.trainer.credit import Credit
from mindrlhf.trainer.grpo import GRPOLoop
from mindrlhf.trainer.preflight import preflight
from mindrlhf.trainer.sources import open_source


def build(job: Job, world: World, stack: ExitStack, signals: StopSignals) -> GRPOLoop:
    """Build the trainer of a job that `signals` may stop; `stack` closes everything."""
    data = read_training_data(job)
    config = job.config
    collectives = Collectives(world)
    checkpoint = continued_checkpoint(job, data, collectives)
    generating = Partition.of_yaml(job.infer, job.model, world.rank)
    scores = generating and generating.first_of_replica and not data.recorded
    rewards = None
    if scores:
        rewards = open_rewards(stack, config.reward, data.prompts, data.source, job.objects.functions, data.total_steps)
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
    source = open_source(config, job.tokenizer, data, run, parts, rewards, partner)
    validation = None
    if generator := parts.get(GENERATOR.name):
        validation = open_validation(
            config,
            job.objects,
            job.tokenizer,
            job.output,
            generator,
            data.problems,
            stack,
            partner if config.validation.environment else None,
            data.total_steps,
        )
        if validation:
            run.residency.add(VALIDATION_CACHE, validation.evaluator.engine.cache.parameters, zeros=True)
    run.begin(parts, {**source.counters, "kl": credit.kl}, dict(source.blobs), stack)
    return GRPOLoop(config, source, parts, credit, run, validation)
