"""Settings that make a job fit. Pure Python."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from mindrlhf.configs.model_yaml import RecomputeSettings
from mindrlhf.memory.estimate import rank_plans
from mindrlhf.memory.work import Work

RECOMPUTE = "train_yaml.recompute_config.recompute"


@dataclass(frozen=True)
class Remedy:
    """Override on the command line, and the largest peak with it in bytes."""

    setting: str
    peak: int


def largest_peak(work: Work) -> int:
    """Compute the peak bytes of the rank that needs the most."""
    return max(plan.peak for plan in rank_plans(work))


def remedies(work: Work) -> list[Remedy]:
    """Find settings that lower the largest peak, best first, then all of them together."""
    limit = 0.99 * largest_peak(work)
    options = _options(work)
    peaks = {name: largest_peak(with_settings(work, {name: value})) for name, value in options.items()}
    helping = sorted((name for name, peak in peaks.items() if peak < limit), key=peaks.get)
    found = [Remedy(f"{name}={options[name]}", peaks[name]) for name in helping]
    if len(found) > 1:
        together = with_settings(work, {name: options[name] for name in helping})
        found.append(Remedy(" ".join(remedy.setting for remedy in found), largest_peak(together)))
    return found


def _options(work: Work) -> dict[str, Any]:
    """Collect settings with possible savings and their values."""
    config = work.config
    micro = work.micro_batches("update")[0]
    recompute = not work.train.computes_again
    options = {
        "memory.swap": not config.memory.swap,
        "train.max_tokens_per_micro_batch": micro.rows // micro.count if micro.count > 1 else 0,
        "rollout.max_slots": max(engine.slots for engine in work.engines("gen")) // 2,
        "rollout.max_new_tokens": config.rollout.max_new_tokens // 2,
        RECOMPUTE: recompute,
        "optimizer.state": None if config.optimizer.state == "int8" else "int8",
    }
    return {name: value for name, value in options.items() if value}


def with_settings(work: Work, settings: Mapping[str, Any]) -> Work:
    """Change settings of a job: `group.key` -> value."""
    config = work.config
    train = work.train
    for name, value in settings.items():
        if name == RECOMPUTE:
            train = train.model_copy(update={"recompute": RecomputeSettings(recompute=value)})
        else:
            group, key = name.split(".")
            config = config.model_copy(update={group: getattr(config, group).model_copy(update={key: value})})
    return replace(work, config=config, yamls={**work.yamls, "train": train})
