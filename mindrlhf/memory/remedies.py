"""Settings that make a job fit. Pure Python."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

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
    single = [(setting, largest_peak(changed), change) for setting, changed, change in _candidates(work)]
    helping = sorted((item for item in single if item[1] < 0.99 * now), key=lambda item: item[1])
    found = [Remedy(setting, peak) for setting, peak, _ in helping]
    if len(helping) > 1:
        for _, _, change in helping:
            work = change(work)
        found.append(Remedy(" ".join(remedy.setting for remedy in found), largest_peak(work)))
    return found


def _candidates(work: Work) -> Iterator[tuple]:
    """List (override, the job with it, function that makes it of a job)."""
    config, micro = work.config, update_micro(work)
    tokens = micro.prefix_size + micro.samples * micro.response_size
    slots = max(engine.slots for engine in engines(work))
    settings = {
        ("memory", "swap"): True if not config.memory.swap else None,
        ("train", "max_tokens_per_micro_batch"): tokens if micro.count > 1 else None,
        ("rollout", "max_slots"): slots // 2 or None,
        ("rollout", "max_new_tokens"): config.rollout.max_new_tokens // 2 or None,
    }
    for (group, key), value in settings.items():
        if value is None:
            continue

        def change(job: Work, group=group, key=key, value=value) -> Work:
            changed = getattr(job.config, group).model_copy(update={key: value})
            return replace(job, config=job.config.model_copy(update={group: changed}))

        yield f"{group}.{key}={value}", change(work), change
    if can_compute_again(work):
        yield "train_yaml.recompute_config.recompute=True", compute_again(work), compute_again


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
