"""Divisions of a split job's ranks, compared by forecasts. Pure Python."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from mindrlhf.configs.placement import (
    COLOCATED,
    GENERATOR_FLAG,
    SPLIT,
    TRAINER_FLAG,
    Division,
    divided_anew,
    layout_beside,
)
from mindrlhf.configs.validate import check_batch, check_dynamic_sampling, check_layout
from mindrlhf.errors import UserError
from mindrlhf.memory.remedies import largest_peak
from mindrlhf.memory.step_time import idle_shares, length_of_step, side_seconds
from mindrlhf.memory.work import Work
from mindrlhf.model_roles import BESIDE, role_of

Forecast = Callable[[Work], Mapping[str, float]]
"""Forecast of a job's seconds by phase."""
Limit = Callable[[Work], int]
"""Bytes that one process of a job may use."""


@dataclass(frozen=True)
class Outlook:
    """Forecast of a job with one division of its ranks.

    trainers, generators: numbers of ranks; all of them, of a colocated job. scorers: ranks that only score. placement:
    `trainer.placement`. arguments: of the command line, for this division. step_seconds: of a step. side_seconds: of
    each layout's ranks in it. idle: shares of a step, see `idle_shares`. peak: bytes of the fullest rank. fits: within
    the limit.
    """

    trainers: int
    generators: int
    scorers: int
    placement: str
    arguments: tuple[str, ...]
    step_seconds: float
    side_seconds: Mapping[str, float]
    idle: Mapping[str, float]
    peak: int
    fits: bool

    @classmethod
    def of(cls, work: Work, seconds: Mapping[str, float], limit: int) -> "Outlook":
        """Look at a job.

        seconds: its forecast. limit: bytes.
        """
        peak = largest_peak(work)
        return cls(
            trainers=work.train.parallel.workers,
            generators=work.infer.parallel.workers,
            scorers=len(work.scorers),
            placement=SPLIT if work.infer.first_rank else COLOCATED,
            arguments=tuple(_arguments(work)),
            step_seconds=length_of_step(work, seconds),
            side_seconds=side_seconds(work, seconds),
            idle=idle_shares(work, seconds),
            peak=peak,
            fits=peak <= limit,
        )


@dataclass(frozen=True)
class Divisions:
    """Divisions of a job's ranks.

    given: the job's own. tried: each division that `train` would take, by its ranks that train, the given one included.
    colocated: all ranks on both sides; None if `train` would refuse it. beside: the given division with
    `trainer.scoring_ranks` infer; None where that is given, or no choice.
    """

    given: Outlook
    tried: tuple[Outlook, ...]
    colocated: Outlook | None
    beside: Outlook | None

    @property
    def proposed(self) -> Outlook | None:
        """Division that fits with the shortest step.

        The given one is chosen before its equals; None if no division fits.
        """
        fitting = [one for one in self.tried if one.fits]
        return min(fitting, key=lambda one: (one.step_seconds, one is not self.given), default=None)

    def figures(self) -> dict[str, Any]:
        """Return everything as plain values."""
        return {
            "given": asdict(self.given),
            "proposed": asdict(self.proposed) if self.proposed else None,
            "colocated": asdict(self.colocated) if self.colocated else None,
            "beside": asdict(self.beside) if self.beside else None,
            "tried": [asdict(one) for one in self.tried],
        }


def compare_divisions(work: Work, seconds: Mapping[str, float], forecast: Forecast, limit: Limit) -> Divisions:
    """Try each division of a split job's ranks.

    Tensor-parallel ranks and stages are the given ones, all other ranks data-parallel; ranks that only score stay as
    they are. seconds: forecast of the job.
    """
    ranks = len(work.ranks) - len(work.scorers)
    given = Outlook.of(work, seconds, limit(work))

    def outlook(other: Work | None) -> Outlook | None:
        return Outlook.of(other, forecast(other), limit(other)) if other else None

    def tried(trainers: int) -> Outlook | None:
        return given if trainers == given.trainers else outlook(divided(work, Division(trainers, ranks - trainers)))

    every = len(work.ranks)
    colocated = outlook(divided(work, Division(every, every), COLOCATED))
    divisions = tuple(one for one in map(tried, range(1, ranks)) if one)
    return Divisions(given, divisions, colocated, outlook(scored_beside(work)))


def scored_beside(work: Work) -> Work | None:
    """Give a split job's reference and teacher to the ranks that generate.

    None if they are there, or cannot be.
    """
    config = work.config
    frozen = [name for name in work.roles if role_of(name).frozen_apart]
    if not frozen or work.scorers or BESIDE in work.yamls or config.algorithm.reference_sync_steps:
        return None
    trainer = config.trainer.model_copy(update={"scoring_ranks": "infer"})
    roles = {**work.roles, **{name: replace(work.roles[name], shares=False) for name in frozen}}
    yamls = {**work.yamls, BESIDE: layout_beside(work.train, work.infer, None)}
    return Work.of(config.model_copy(update={"trainer": trainer}), roles, yamls, work.lengths)


def divided(work: Work, division: Division, placement: str = SPLIT) -> Work | None:
    """Give a job another division of its ranks; None if `train` would refuse it."""
    config = work.config
    try:
        train, infer = divided_anew(work.train, work.infer, division, placement)
        for yaml in (train, infer):
            check_layout(yaml, work.model, yaml.parallel.workers)
        check_batch(config, train, infer)
        check_dynamic_sampling(config, infer)
        trainer = config.trainer.model_copy(update={"placement": placement})
        config = config.model_copy(update={"trainer": trainer})
        yamls = {**work.yamls, "train": train, "infer": infer}
        if placement == COLOCATED:
            yamls = {"train": train, "infer": infer}
        elif BESIDE in yamls:
            yamls[BESIDE] = layout_beside(train, infer, None)
        return Work.of(config, work.roles, yamls, work.lengths)
    except UserError:
        return None


def _arguments(work: Work) -> list[str]:
    """List the arguments of a division.

    They override data-parallel ranks of a YAML.
    """
    arguments = [f"trainer.placement={COLOCATED}"]
    if work.infer.first_rank:
        sides = ((TRAINER_FLAG, work.train), (GENERATOR_FLAG, work.infer))
        arguments = [word for flag, yaml in sides for word in (flag, str(yaml.parallel.workers))]
    sides = (("train_yaml", work.train), ("infer_yaml", work.infer))
    return arguments + [f"{name}.parallel_config.data_parallel={yaml.parallel.data_parallel}" for name, yaml in sides]
