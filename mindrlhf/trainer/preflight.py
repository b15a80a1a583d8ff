"""Checks of the environment before a job: errors of one sentence, or one summary."""

import logging
import shutil
import socket
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mindrlhf.algorithms.advantages import ADVANTAGES
from mindrlhf.algorithms.losses import POLICY_LOSSES
from mindrlhf.algorithms.rehearsal import rehearse_advantage, rehearse_loss
from mindrlhf.backend import find_device
from mindrlhf.backend.ceiling import matmul_ceiling
from mindrlhf.backend.comm.collectives import Collectives
from mindrlhf.backend.process.launch import operator_threads
from mindrlhf.backend.process.wait_for_ranks import roll_call
from mindrlhf.checkpoint.tokenizer import stop_ids
from mindrlhf.configs.algorithm import AlgorithmSettings
from mindrlhf.configs.grpo import GRPOSettings, RolloutSettings
from mindrlhf.configs.model import ModelConfig
from mindrlhf.data.tokenizer import Tokenizer
from mindrlhf.environments.open import sandbox_note
from mindrlhf.errors import UserError
from mindrlhf.files.settings_file import versions
from mindrlhf.files.text import folded
from mindrlhf.job import Job
from mindrlhf.memory.batch_table import batch_table
from mindrlhf.memory.estimate import rank_plans
from mindrlhf.memory.limit import free_memory, memory_limit
from mindrlhf.memory.pictures import Lengths, Pictures
from mindrlhf.memory.step_time import Rates, forecast, length_of_step, run_rates, time_line
from mindrlhf.memory.work import Work
from mindrlhf.model_roles import EXPORTED, RoleModel
from mindrlhf.models.adapters import trained_lines
from mindrlhf.models.parameters import parameter_count, parameter_table, trained_count
from mindrlhf.optimizer_state import State, moment_bytes
from mindrlhf.rewards.batches import Sample
from mindrlhf.rewards.runner import RewardRunner
from mindrlhf.rollout.decode_graphs import FUSED_TOKENS
from mindrlhf.rollout.sampling import draws_in_operator
from mindrlhf.run.training_data import TrainingData
from mindrlhf.types import Prompt
from mindrlhf.units import FLOAT32, GIB, size
from mindrlhf.workers.cores import usable_cores

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RankResources:
    """Resources of a rank: host, threads, bytes of free memory, FLOP/s.

    cores: those that the rank may use. rates: see `run_rates`. reward: outcome of a trial of the reward functions, on
    the first rank that scores.
    """

    host: str
    threads: int
    cores: frozenset[int]
    memory: int
    ceiling: float
    rates: Rates | None = None
    reward: str | None = None


def preflight(job: Job, collectives: Collectives, data: TrainingData, rewards: RewardRunner | None) -> float | None:
    """Check the environment on every rank; the first prints the summary.

    Returns the first rank's forecast of a step's seconds, None without one. Raises UserError for a problem that would
    fail later. rewards: given on the ranks that score.
    """
    prompts = [] if data.recorded else data.prompts
    world = collectives.world
    longest = max((len(prompt.token_ids) for prompt in prompts), default=0)
    lengths = Lengths(longest, pictures=Pictures.of(prompts, job.model.vision))
    work = Work.of(job.config, job.roles, job.yamls, lengths) if prompts else None
    if work and collectives.is_first:
        print(folded(batch_table(work), 4), flush=True)
    answered = roll_call(collectives, world.abort, job.config.trainer.rank_timeout_s)
    for folder in {job.output, job.flags.save_ckpt_dir}:
        check_writable(folder)
    dtype = job.train.model.compute_dtype
    threads = operator_threads()
    ceiling = matmul_ceiling(world.device_target, dtype)
    rates = run_rates(work, data.total_steps, ceiling) if work else None
    reward = None
    if prompts and rewards and world.rank == job.infer.ranks[0]:
        reward = try_reward(rewards, prompts[0], job.tokenizer, job.config.rollout.max_new_tokens)
    own = RankResources(socket.gethostname(), threads, usable_cores(), free_memory()[0], ceiling, rates, reward)
    ranks: list[RankResources] = collectives.all_gather_object(own)
    if not collectives.is_first:
        return None
    rehearse(job.config.algorithm)
    lines = {
        "versions": ", ".join(f"{name} {version}" for name, version in versions().items()),
        "devices": devices(world.device_target, ranks, dtype),
        "operators": operators_line(
            job.config.rollout, job.model, job.infer.parallel.ranks_of_a_step, world.device_target
        ),
        "ranks": f"all {len(ranks)} answered within {answered:.1f} s" if len(ranks) > 1 else "one process",
        "model": f"{job.model.family}, {parameter_count(job.model):,} parameters",
        **trained_lines(job.model, job.config),
        "tokenizer": tokenizer_line(job.tokenizer, job.model),
        "disk": disk_line(job.flags.save_ckpt_dir, *disk_needs(job.config, job.roles)),
    }
    seconds = None
    if work:
        lines["memory"] = memory_line(work, ranks)
        seconds = forecast(work, [rank.rates for rank in ranks])
        lines["time"] = time_line(work, data.total_steps, seconds)
    if tried := next(filter(None, (rank.reward for rank in ranks)), None):
        lines["reward"] = tried
    if note := sandbox_note(job.config.rollout):
        lines["sandbox"] = note
    print(block(lines), flush=True)
    return length_of_step(work, seconds) if seconds else None


def rehearse(algorithm: AlgorithmSettings) -> None:
    """Try a user's advantage and policy loss on small numbers. Raises UserError."""
    if algorithm.advantage not in ADVANTAGES:
        rehearse_advantage(algorithm.method, algorithm.options_of(algorithm.method))
    if algorithm.policy_loss not in POLICY_LOSSES:
        rehearse_loss(algorithm.loss())


def operators_line(settings: RolloutSettings, model: ModelConfig, ranks: int, target: str) -> str:
    """Describe the form of the layers' halves, and tokens per decode call.

    ranks: those that compute a decode step together.
    """
    device = find_device(target)
    fused = not device.fused_problem()
    bans = model.vision is not None
    several = fused and not settings.tool_images and draws_in_operator(settings, model.vocab_size, ranks, bans)
    updates = ", composed ones in updates (lora.dropout)" if fused and model.dropout else ""
    tokens = f"up to {FUSED_TOKENS} tokens" if several else "one token"
    return f"{device.describe_operators()}{updates}; decoding {tokens} a call"


def block(lines: Mapping[str, str]) -> str:
    width = max(map(len, lines))
    text = "\n".join(["preflight:", *(f"  {name:<{width}}  {text}" for name, text in lines.items())])
    return folded(text, width + 4)


def devices(target: str, ranks: Sequence[RankResources], dtype: str) -> str:
    """Describe hosts: processes, threads, cores left idle, free memory, and measured matrix products."""
    hosts = {host: [rank for rank in ranks if rank.host == host] for host in dict.fromkeys(rank.host for rank in ranks)}
    return f"{target}, " + "; ".join(
        f"{host}: {len(there)} x {there[0].threads} threads{idle_cores(there)}, "
        f"{min(rank.memory for rank in there) / GIB:.1f} GiB of memory free, "
        f"{sum(rank.ceiling for rank in there) / 1e9:.0f} GFLOP/s of {dtype} products"
        for host, there in hosts.items()
    )


def idle_cores(ranks: Sequence[RankResources]) -> str:
    """Say how many cores of a host are idle.

    Nothing is said unless each rank could have one thread more.
    """
    cores = frozenset[int]().union(*(rank.cores for rank in ranks))
    idle = len(cores) - sum(rank.threads for rank in ranks)
    return f" (OMP_NUM_THREADS leaves {idle} of {len(cores)} cores idle)" if idle >= len(ranks) else ""


def memory_line(work: Work, ranks: Sequence[RankResources]) -> str:
    """Compare the largest planned peak with the memory of the device or host."""
    fullest = max(rank_plans(work), key=lambda plan: plan.peak)
    processes = Counter(rank.host for rank in ranks)
    limit = min(rank.memory // processes[rank.host] for rank in ranks)
    if not work.train.context.device.in_host_memory:
        limit, _ = memory_limit(work.train, len(ranks), outside=work.communicator_bytes)
    text = f"{size(fullest.peak)} planned at most for a process, in {fullest.peak_phase}"
    if fullest.peak <= limit:
        return text
    return f"{text}: NOT ENOUGH, {size(limit)} are there for each; `mindrlhf plan` says which settings help"


def check_writable(folder: Path) -> None:
    """Raise UserError for a folder that cannot be written to."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"0")
    except OSError as error:
        found = f"{folder}: cannot be written to ({error.strerror})"
        raise UserError(f"{found}; free some space, or give another folder.") from error


def disk_needs(config: GRPOSettings, roles: Mapping[str, RoleModel]) -> tuple[int, int]:
    """Compute bytes of disk: the least for saving, and for all files.

    An exported model is one copy of the weights in float32; a checkpoint has the trained ones with two moments. While a
    checkpoint is written, the disk has one more than is kept. Rollouts are not counted.
    """
    exported = {role: roles[role.name].model for role in EXPORTED if role.name in roles}
    weights = FLOAT32 * sum(map(parameter_count, exported.values()))
    settings = config.trainer
    if settings.save_freq is None:
        return weights, weights
    states = {role: role.optimizer(config).state for role in exported}
    checkpoint = sum(checkpoint_bytes(model, states[role]) for role, model in exported.items())
    return weights + checkpoint, weights + checkpoint * (1 + (settings.save_max_ckpt_num or 0))


def checkpoint_bytes(model: ModelConfig, state: State) -> int:
    """Compute the bytes of trained weights with their moments."""
    shapes = [spec.shape for spec in parameter_table(model) if spec.trains]
    return FLOAT32 * trained_count(model) + 2 * sum(moment_bytes(state, shape) for shape in shapes)


def disk_line(folder: Path, least: int, whole: int) -> str:
    """Compare free disk with the need; raises UserError below the least."""
    free = shutil.disk_usage(folder).free
    if free < least:
        found = f"{folder}: {size(free)} are free, and the trained model with one checkpoint takes {size(least)}"
        raise UserError(f"{found}; free some space, or give --save_ckpt_dir another disk.")
    text = f"{size(free)} free, {size(whole)} for the trained model and its checkpoints"
    if free >= whole:
        return text
    return f"{text}: NOT ENOUGH for all of them; lower trainer.save_max_ckpt_num, or use another disk"


def tokenizer_line(tokenizer: Tokenizer, model: ModelConfig) -> str:
    """Describe the tokenizer's size, the model's, and the end tokens."""
    text = f"{tokenizer.size} tokens of the model's {model.vocab_size}"
    ends = stop_ids(tokenizer, model)
    if not ends:
        return f"{text}; NO END TOKEN: every answer runs to rollout.max_new_tokens, see eos_token_id of config.json"
    return f"{text}; answers end with {', '.join(repr(tokenizer.decode([token])) for token in ends)}"


def try_reward(runner: RewardRunner, prompt: Prompt, tokenizer: Tokenizer, max_new_tokens: int) -> str:
    """Score three answers to a row; UserError if a function fails for all three."""
    truth = prompt.fields.get("ground_truth", "")
    text = tokenizer.decode(list(prompt.text_ids))
    ids = prompt.token_ids
    fields = {**prompt.fields, "response_length": "1", "max_new_tokens": str(max_new_tokens)}
    answers = (truth, f"The answer is {truth}.", "")
    given = prompt.objects
    table = runner.score([Sample(text, answer, fields, ids, tokenizer.encode(answer), given) for answer in answers])
    parts = []
    for name, scores in table.by_function.items():
        errors = table.errors[name]
        if len(errors) == len(scores):
            found = f"reward.functions: {name} fails on the first row of the data, whatever the answer"
            reason = next(iter(errors.values()))
            raise UserError(f"{found} ({reason}); mend it, and try it with `mindrlhf reward-check`.")
        shown = ", ".join("failed" if i in errors else _score(score) for i, score in enumerate(scores))
        parts.append(f"{name} {shown} ({1000 * np.mean(table.seconds[name]):.1f} ms each)")
    for failure in table.first_failures:
        _log.warning("reward function %s failed in the preflight (%s)", failure.function, failure.reason)
    return f"the first row's answer, in a sentence, none: {'; '.join(parts)}"


def _score(value: float) -> str:
    return "unscored" if np.isnan(value) else f"{value + 0.0:.3g}"  # -0 shows as 0
