"""Metrics of time, speed and memory: `timing_s/*`, `timing_per_token_ms/*`, `perf/*`, `training/*`."""

import resource
import sys
from collections.abc import Mapping
from pathlib import Path

import psutil

from mindrlhf.metrics.metric_set import MetricSet
from mindrlhf.phases import PHASES
from mindrlhf.units import GIB


def resident_bytes() -> int:
    """Read the resident memory (RSS) of this process now."""
    return psutil.Process().memory_info().rss


def peak_resident_bytes() -> int:
    """Read the highest resident memory that this process ever had.

    Linux's own counter is read if present: `getrusage` would also count the process that started this one.
    """
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def add_timings(
    metrics: MetricSet, seconds: Mapping[str, float], response_tokens: int, total_tokens: int, ranks: int = 1
) -> None:
    """Add `timing_s/<phase>` (mean over ranks) and `timing_per_token_ms/<phase>` as verl defines them.

    seconds: phase -> seconds of this rank, from `Timers.collect`.
    response_tokens, total_tokens: this rank's own share; 0 on a rank that holds a copy of another one's rows.
        Generation is divided by response tokens, every other phase by prompt and response tokens.
    ranks: how many ranks the metrics are reduced over.
    """
    for phase, elapsed in seconds.items():
        metrics.add(f"timing_s/{phase}", elapsed)
        if phase in PHASES and PHASES[phase].per_token:
            tokens = response_tokens if phase == "gen" else total_tokens
            metrics.add(f"timing_per_token_ms/{phase}", 1000.0 * elapsed / ranks, tokens)


def add_performance(
    metrics: MetricSet, step_seconds: float, total_tokens: int, device_peak_bytes: int | None = None
) -> None:
    """Add `perf/*` for one step of this rank.

    `perf/throughput` is tokens of all ranks / (seconds of a step x ranks), verl's definition.
    `perf/cpu_memory_used_gb` is the resident memory of the largest process now, `perf/max_memory_allocated_gb` the
    highest peak: of the device where the caller knows it, otherwise of the process. GB here means 1024**3 bytes, as
    in verl.

    total_tokens: prompt and response tokens of this rank's own rows, prompts counted once for each of their responses.
    """
    metrics.add_total("perf/total_num_tokens", total_tokens)
    metrics.add("perf/time_per_step", step_seconds)
    metrics.add("perf/throughput", total_tokens, step_seconds)
    peak = peak_resident_bytes() if device_peak_bytes is None else device_peak_bytes
    metrics.add_max("perf/cpu_memory_used_gb", resident_bytes() / GIB)
    metrics.add_max("perf/max_memory_allocated_gb", peak / GIB)


def add_training(metrics: MetricSet, global_step: int, epoch: float) -> None:
    """Add `training/global_step` and `training/epoch`, which are the same on all ranks."""
    metrics.add_max("training/global_step", global_step)
    metrics.add_max("training/epoch", epoch)
