"""Settings that make a job fit. Pure Python."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from mindrlhf.configs.model_yaml import RecomputeSettings
from mindrlhf.configs.validate import check_recompute
from mindrlhf.errors import UserError
from mindrlhf.memory.estimate import Work, engines, update_micro


@dataclass(frozen=True)
class Remedy:
    """Setting that lowers the largest peak.

    It is an override on the command line, and the largest peak of any rank with it, in bytes.
    """

    setting: str
    peak: int


def largest_peak(work: Work) -> int:
    """Compute the peak bytes of the rank that needs the most."""
    return max(plan.peak for plan in work.rank_plans())


def remedies(work: Work) -> list[Remedy]:
    """Find settings that lower the largest peak, the best first.

    Each stands by itself; all of these together come last.
    """
    now = largest_peak(work)
    single = [(Remedy(setting, largest_peak(change(work))), change) for setting, change in _changes(work).items()]
    helping = sorted((pair for pair in single if pair[0].peak < 0.99 * now), key=lambda pair: pair[0].peak)
    found = [remedy for remedy, _ in helping]
    if len(helping) > 1:
        for _, change in helping:
            work = change(work)
        found.append(Remedy(" ".join(remedy.setting for remedy in found), largest_peak(work)))
    return found


def _changes(work: Work) -> dict[str, Callable[[Work], Work]]:
    """Collect settings with possible savings: override -> change of a job."""
    config, micro = work.config, update_micro(work)
    settings = {
        "memory.swap": None if config.memory.swap else True,
        "train.max_tokens_per_micro_batch": micro.rows // micro.count if micro.count > 1 else None,
        "rollout.max_slots": max(engine.slots for engine in engines(work)) // 2 or None,
        "rollout.max_new_tokens": config.rollout.max_new_tokens // 2 or None,
    }
    changes = {
        f"{setting}={value}": partial(with_setting, setting=setting, value=value)
        for setting, value in settings.items()
        if value is not None
    }
    if can_compute_again(work):
        changes["train_yaml.recompute_config.recompute=True"] = compute_again
    return changes


def with_setting(work: Work, setting: str, value: int) -> Work:
    """Change one setting of a job: `group.key`."""
    group, _, key = setting.partition(".")
    changed = getattr(work.config, group).model_copy(update={key: value})
    return replace(work, config=work.config.model_copy(update={group: changed}))


def can_compute_again(work: Work) -> bool:
    """Test that recomputation would save activations."""
    if work.train.recompute.recompute or not work.fused or work.train.parallel.pipeline_stage > 1:
        return False
    try:
        check_recompute(compute_again(work).train)
    except UserError:
        return False
    return True


def compute_again(work: Work) -> Work:
    """Change a job to compute its layers again."""
    train = work.train.model_copy(update={"recompute": RecomputeSettings(recompute=True)})
    return replace(work, train=train)
