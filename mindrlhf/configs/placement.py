"""Placement of training and generation: on the same ranks, or apart."""

from typing import Any, NamedTuple, Protocol

from mindrlhf.configs.model_defaults import with_all_workers
from mindrlhf.configs.model_yaml import ModelYaml, ParallelSettings
from mindrlhf.errors import UserError

SPLIT, COLOCATED = "split", "colocated"  # of trainer.placement
TRAINER_FLAG, GENERATOR_FLAG = "--trainer_ranks", "--generator_ranks"


class PlacementFlags(Protocol):
    """Flags that divide a job's ranks."""

    trainer_ranks: int | None
    generator_ranks: int | None


class Division(NamedTuple):
    """Numbers of ranks that train and that generate, from flags; None without flags."""

    trainers: int | None = None
    generators: int | None = None

    @classmethod
    def of(cls, flags: PlacementFlags) -> "Division":
        """Read the flags. Raises UserError for one without the other."""
        given = {TRAINER_FLAG: flags.trainer_ranks, GENERATOR_FLAG: flags.generator_ranks}
        for flag, ranks in given.items():
            other, theirs = next(item for item in given.items() if item[0] != flag)
            if ranks is None and theirs is not None:
                raise UserError(f"{other} is {theirs}, and {flag} is not given; give both, or neither.")
            if ranks is not None and ranks < 1:
                raise UserError(f"{flag} is {ranks}; give 1 or more.")
        return cls(trainers=flags.trainer_ranks, generators=flags.generator_ranks)

    def defaults(self) -> dict[str, Any]:
        """Return the settings that the flags imply."""
        return {"trainer": {"placement": SPLIT}} if self.trainers else {}

    def fitted(self, train: ModelYaml, infer: ModelYaml) -> tuple[ModelYaml, ModelYaml]:
        """Give each layout its number of ranks from flags; UserError for another product."""
        sides = ((train, self.trainers, TRAINER_FLAG), (infer, self.generators, GENERATOR_FLAG))
        fitted = [_fitted(yaml, ranks, flag) if ranks else yaml for yaml, ranks, flag in sides]
        return fitted[0], fitted[1]


def _fitted(yaml: ModelYaml, ranks: int, flag: str) -> ModelYaml:
    yaml = with_all_workers(yaml, ranks)
    if yaml.parallel.workers != ranks:
        found = f"{yaml.path}: parallel_config is {factors(yaml)}, and {flag} is {ranks}"
        raise UserError(f"{found}; set parallel_config to a product of {ranks}, or {flag} to {yaml.parallel.workers}.")
    return yaml


def placed(train: ModelYaml, infer: ModelYaml, placement: str, division: Division) -> ModelYaml:
    """Place the generating layout on the ranks of training, or behind them."""
    infer = infer.generating
    if placement == SPLIT:
        return infer.model_copy(update={"first_rank": train.parallel.workers})
    if division.trainers:
        found = f"trainer.placement is {placement}, and {TRAINER_FLAG} and {GENERATOR_FLAG} divide the ranks"
        raise UserError(f"{found}; set trainer.placement to split, or leave them out.")
    return infer


def divided_anew(
    train: ModelYaml, infer: ModelYaml, division: Division, placement: str = SPLIT
) -> tuple[ModelYaml, ModelYaml]:
    """Give placed layouts other numbers of ranks, by data-parallel ones alone.

    Raises UserError if the tensor-parallel ranks and stages do not divide them.
    """
    train, infer = division.fitted(_without_replicas(train), _without_replicas(infer))
    return train, placed(train, infer, placement, division if placement == SPLIT else Division())


def _without_replicas(yaml: ModelYaml) -> ModelYaml:
    """Forget the place of a layout, and its number of data-parallel ranks."""
    given = yaml.parallel.model_dump(exclude={"data_parallel"}, exclude_unset=True)
    return yaml.model_copy(update={"parallel": ParallelSettings(**given), "first_rank": 0})


def check_workers(train: ModelYaml, infer: ModelYaml, placement: str, workers: int) -> None:
    """Check that the two sides of a split placement are all workers.

    workers: processes that were started. Colocated layouts are checked one by one.
    """
    ours, theirs = train.parallel.workers, infer.parallel.workers
    if placement == SPLIT and ours + theirs != workers:
        found = f"trainer.placement is split, {train.path} has {factors(train)} and {infer.path} {factors(infer)}"
        right = f"start {ours + theirs} (msrun --worker_num={ours + theirs}), or divide {workers} by "
        raise UserError(f"{found}, and the workers started are {workers}; {right}{TRAINER_FLAG} and {GENERATOR_FLAG}.")


def planned_workers(train: ModelYaml, infer: ModelYaml) -> int:
    """Count the workers that both layouts ask for. Raises UserError if colocated ones differ."""
    ours, theirs = train.parallel.workers, infer.parallel.workers
    if infer.first_rank:
        return ours + theirs
    if ours != theirs:
        found = f"{infer.path}: parallel_config is of {theirs} workers, and that of {train.path} of {ours}"
        raise UserError(f"{found}; both run on the same workers, so give equal products.")
    return ours


def factors(yaml: ModelYaml) -> str:
    """Describe a layout's number of ranks as a product."""
    parallel = yaml.parallel
    axes = f"data_parallel {parallel.data_parallel} x model_parallel {parallel.model_parallel}"
    return f"{axes} x pipeline_stage {parallel.pipeline_stage} = {parallel.workers}"
