"""Building of a GRPO trainer from a checked job."""

from contextlib import ExitStack

from mindrlhf.backend.comm.collectives import Collectives
from mindrlhf.backend.process.launch import World
from mindrlhf.job import Job
from mindrlhf.roles.parts import open_parts
from mindrlhf.run.compile_cache import use_compile_cache
from mindrlhf.run.run import Run, continued_checkpoint
from mindrlhf.run.stop_signals import StopSignals
from mindrlhf.run.training_data import read_training_data
from mindrlhf.trainer.credit import Credit
from mindrlhf.trainer.grpo import GRPOTrainer
from mindrlhf.trainer.preflight import preflight
from mindrlhf.trainer.rollout_phase import open_rewards, open_rollout_phase


def build(job: Job, world: World, stack: ExitStack, signals: StopSignals) -> GRPOTrainer:
    """Build the trainer of a job; `stack` closes everything at the end.

    signals: may ask the run to stop.
    """
    data = read_training_data(job)
    collectives = Collectives(world)
    checkpoint = continued_checkpoint(job, data, collectives)
    rewards = open_rewards(job, data, collectives, stack)
    preflight(job, collectives, [] if data.recorded else data.prompts, rewards)
    use_compile_cache(job, world, stack)
    run = Run(job, data, collectives, checkpoint, signals)
    parts = open_parts(job, collectives, data.max_positions, checkpoint, run.residency, generates=not data.recorded)
    credit = Credit(job.config, parts.policy.data_parallel)
    rollout = open_rollout_phase(job, data, parts.generator, rewards, run, stack)
    counters, blobs = {"stream": data.stream, "kl": credit.kl}, {"surplus": rollout and rollout.sampling}
    run.begin(parts, counters, blobs, stack)
    return GRPOTrainer(job.config, data, parts, credit, rollout, run)
