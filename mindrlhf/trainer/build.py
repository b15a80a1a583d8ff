"""Building of a GRPO trainer from a checked job."""

from contextlib import ExitStack

from mindrlhf.backend.comm.collectives import Collectives
from mindrlhf.backend.process.launch import World
from mindrlhf.environments.open import open_partner
from mindrlhf.evaluation.validation import ToldValidation, Validation, open_validation
from mindrlhf.job import Job
from mindrlhf.model_roles import GENERATOR, POLICY, SCORE
from mindrlhf.parallel.partition import Partition
from mindrlhf.rewards.runner import open_rewards
from mindrlhf.roles.parts import Parts, open_parts
from mindrlhf.rollout.partner import Partner
from mindrlhf.run.compile_cache import use_compile_cache
from mindrlhf.run.run import Run, continued_checkpoint
from mindrlhf.run.step_report import StepReport
from mindrlhf.run.stop_signals import StopSignals
from mindrlhf.run.training_data import TrainingData, read_training_data
from mindrlhf.trainer.credit import Credit
from mindrlhf.trainer.grpo import GeneratingLoop, GRPOLoop, ScoringLoop
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
    known = run.report.known_rows
    parts = open_parts(config, job.yamls, roles, collectives, data.max_positions, checkpoint, run.residency, known)
    trains = POLICY.name in parts
    credit = Credit(config, parts.policy.data_parallel) if trains else None
    exchange = parts.exchange(job.yamls, job.roles, collectives, run.timers)
    source = open_source(job, data, run, parts, rewards, partner)
    validation = open_held_out(job, data, run, parts, partner, stack)
    counters = {**source.counters, "kl": credit and credit.kl}
    run.begin(parts, counters, dict(source.blobs), stack)
    kinds = {"train": GRPOLoop, "infer": GeneratingLoop, SCORE: ScoringLoop}
    return kinds[job.layout(world.rank)](config, source, parts, credit, run, exchange, validation)


def open_held_out(
    job: Job, data: TrainingData, run: Run, parts: Parts, partner: Partner | None, stack: ExitStack
) -> Validation | ToldValidation | None:
    """Open the evaluation of held-out problems on the ranks that generate; None without any."""
    own = None
    config = job.config
    if generator := parts.get(GENERATOR.name):
        own = open_validation(
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
        if own:
            own.register(run.residency)
    if not (job.splits and data.problems):
        return own
    return ToldValidation(own, run.collectives, job.infer.ranks[0])
