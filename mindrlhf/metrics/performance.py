"""Metrics of time, speed and memory: `timing_s/*`, `timing_per_token_ms/*`, `perf/*`, `training/*`."""

import resource
import sys
from collections.abc import Collection, Mapping
from pathlib import Path

import psutil

from mindrlhf.metrics.metric_set import MetricSet
from mindrlhf.metrics.timer import STEP
from mindrlhf.phases import PHASES
from mindrlhf.units import GIB


def resident_bytes() -> int:
    return psutil.Process().memory_info().rss


def peak_resident_bytes() -> int:
    """Read the highest resident memory that this process ever had.

    It reads Linux's own counter if present: `getrusage` would also count the process that started this one.
    """
    status = Path("/proc/self/status")
    for line in status.read_text().splitlines() if status.exists() else ():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def add_performance(
    metrics: MetricSet,
    seconds: Mapping[str, float],
    response_tokens: int,
    total_tokens: int,
    ranks: int = 1,
    elsewhere: Collection[str] = (),
) -> None:
    """Add `timing_s/*`, `timing_per_token_ms/*` and `perf/*` of a step, as verl defines them.

    Times are means over ranks. Generation is divided by response tokens, every other phase by prompt and response
    tokens. `perf/throughput`: tokens of all ranks / (seconds of a step x ranks). `perf/cpu_memory_used_gb`: resident
    memory of the largest process now, `perf/max_memory_allocated_gb` its highest peak, in 1024**3 bytes. seconds: phase
    -> seconds of this rank. response_tokens: sampled tokens. total_tokens: responses with their prompts. Both are 0 on
    a rank that holds a copy of another one's rows. ranks: how many ranks have this one's phases. elsewhere: phases that
    only other ranks have, for this rank's tokens.
    """
    for phase, elapsed in seconds.items():
        metrics.add(f"timing_s/{phase}", elapsed)
    for phase in (name for name in (*seconds, *elsewhere) if name in PHASES and PHASES[name].per_token):
        tokens = response_tokens if phase == "gen" else total_tokens
        metrics.add(f"timing_per_token_ms/{phase}", 1000.0 * seconds.get(phase, 0.0) / ranks, tokens)
    step_seconds = seconds.get(STEP, 0.0)
    metrics.add_total("perf/total_num_tokens", total_tokens)
    metrics.add("perf/time_per_step", step_seconds)
    metrics.add("perf/throughput", total_tokens, step_seconds)
    metrics.add_max("perf/cpu_memory_used_gb", resident_bytes() / GIB)
    metrics.add_max("perf/max_memory_allocated_gb", peak_resident_bytes() / GIB)


def add_idle(metrics: MetricSet, seconds: Mapping[str, float], side: str) -> None:
    """Add `trainer/idle_ratio`, `generator/idle_ratio` or `scorer/idle_ratio`: a step's share of waiting."""
    metrics.add(f"{side}/idle_ratio", seconds.get("wait", 0.0), seconds.get(STEP, 0.0))


def add_training(metrics: MetricSet, global_step: int, epoch: float) -> None:
    """Add `training/global_step` and `training/epoch`, the same on all ranks."""
    metrics.add_max("training/global_step", global_step)
    metrics.add_max("training/epoch", epoch)
