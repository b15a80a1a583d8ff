"""Reward processes for tests: faulty functions, a runner of them, samples."""

from pathlib import Path

import psutil

from mindrlhf.configs.grpo import RewardFunctionSettings, RewardSettings
from mindrlhf.rewards.batches import Sample
from mindrlhf.rewards.runner import RewardRunner

FAULTS = (Path(__file__).parents[1] / "rewards" / "faulty.py").read_text()


def runner(*names, workers=1, timeout_s=10.0, weights=None, args=None):
    functions = tuple(
        RewardFunctionSettings(
            name=name, weight=weights[place] if weights else 1.0, args=(args or {}) if place == 0 else {}
        )
        for place, name in enumerate(names)
    )
    return RewardRunner(RewardSettings(functions=functions, workers=workers, timeout_s=timeout_s))


def texts(*completions):
    return [Sample("a prompt", completion, {"ground_truth": "5"}) for completion in completions]


def command(process):
    try:
        return process.cmdline()
    except psutil.ZombieProcess:
        return ["mindrlhf.rewards zombie"]
    except psutil.NoSuchProcess:
        return []
