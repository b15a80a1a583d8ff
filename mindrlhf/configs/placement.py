"""Placement of training, generation and scoring: on the same ranks, or apart."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from mindrlhf.configs.layers import merge
from mindrlhf.configs.model_defaults import with_all_workers
from mindrlhf.configs.model_yaml import ModelYaml, ParallelSettings, typed_model_yaml
from mindrlhf.configs.yaml_file import Layer
from mindrlhf.errors import UserError
from mindrlhf.files.text import numbered

SPLIT, COLOCATED = "split", "colocated"  # of trainer.placement
PARALLEL_GROUPS = ("parallel_config", "parallel")  # of a model YAML
TRAINER_FLAG, GENERATOR_FLAG, SCORER_FLAG = "--trainer_ranks", "--generator_ranks", "--scorer_ranks"


class ByLayout:
    """Holder of a model YAML for each layout.

    yamls: by the names of layouts in `model_roles.Role`.
    """

    yamls: Mapping[str, ModelYaml]

    @property
    def train(self) -> ModelYaml:
        """Model YAML of the graphs that train."""
        return self.yamls["train"]

    @property
    def infer(self) -> ModelYaml:
        """Model YAML of the graphs that generate."""
        return self.yamls["infer"]


class PlacementFlags(Protocol):
    """Flags that divide a job's ranks."""

    trainer_ranks: int | None
    generator_ranks: int | None
    scorer_ranks: int | None


class Division(NamedTuple):
    """Numbers of ranks that train, generate, or only score; None without flags."""

    trainers: int | None = None
    generators: int | None = None
    scorers: int | None = None

    @classmethod
    def of(cls, flags: PlacementFlags) -> "Division":
        """Read the flags. Raises UserError for one without the other."""
        given = {TRAINER_FLAG: flags.trainer_ranks, GENERATOR_FLAG: flags.generator_ranks}
        for flag, ranks in given.items():
            other, theirs = next(item for item in given.items() if item[0] != flag)
            if ranks is None and theirs is not None:
                raise UserError(f"{other} is {theirs}, and {flag} is not given; give both, or neither.")
        scorers = flags.scorer_ranks
        for flag, ranks in {**given, SCORER_FLAG: scorers}.items():
            if ranks is not None and ranks < 1:
                raise UserError(f"{flag} is {ranks}; give 1 or more.")
        if scorers and flags.trainer_ranks is None:
            raise UserError(
                f"{SCORER_FLAG} is {scorers}, and {TRAINER_FLAG} and {GENERATOR_FLAG} are not given; give all three."
            )
        return cls(trainers=flags.trainer_ranks, generators=flags.generator_ranks, scorers=scorers)

    def defaults(self) -> dict[str, Any]:
        """Return the settings that the flags imply."""
        return {"trainer": {"placement": SPLIT}} if self.trainers else {}

    def fitted(self, train: ModelYaml, infer: ModelYaml) -> tuple[ModelYaml, ModelYaml]:
        """Give each layout its number of ranks from flags; UserError for another product."""
        sides = ((train, self.trainers, TRAINER_FLAG), (infer, self.generators, GENERATOR_FLAG))
        first, second = (fitted(yaml, ranks, flag) if ranks else yaml for yaml, ranks, flag in sides)
        return first, second


def fitted(yaml: ModelYaml, ranks: int, flag: str) -> ModelYaml:
    """Give a layout its number of ranks from a flag; UserError for another product."""
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


def layout_of_scorers(train: ModelYaml, overrides: Sequence[str], ranks: int | None) -> ModelYaml | None:
    """Give the training YAML the layout of ranks that only score; None without any.

    It has the same tensor-parallel ranks, and all other ranks data-parallel, by default. overrides: of its parallel
    settings. Raises UserError.
    """
    if ranks is None:
        if overrides:
            found = f"score_yaml.{overrides[0]} is given, and no rank only scores"
            raise UserError(f"{found}; give {SCORER_FLAG}, or leave it out.")
        return None
    for override in overrides:
        key = override.partition("=")[0]
        if key.partition(".")[0] not in PARALLEL_GROUPS:
            found = f"score_yaml.{key} is given, and only the layout of ranks that score is their own"
            raise UserError(f"{found}; set train_yaml.{key}, which they have too, or score_yaml.parallel_config.")
    path = f"score_yaml of {train.path}"
    values = {"parallel_config": {"model_parallel": train.parallel.model_parallel}}
    own = typed_model_yaml(merge([Layer(values, {(): path})], overrides), path)
    return fitted(train.model_copy(update={"path": path, "parallel": own.parallel}), ranks, SCORER_FLAG)


def layout_beside(train: ModelYaml, infer: ModelYaml, scorers: int | None) -> ModelYaml:
    """Give the training YAML the ranks and the layout of generation.

    scorers: ranks that only score. Raises UserError.
    """
    found = "trainer.scoring_ranks is infer"
    if scorers:
        raise UserError(f"{found}, and {SCORER_FLAG} is {scorers}; leave one of them out.")
    if not infer.first_rank:
        found = f"{found}, and all ranks train and generate (trainer.placement {COLOCATED})"
        raise UserError(f"{found}; set trainer.placement to split, or trainer.scoring_ranks to train.")
    return train.model_copy(update={"path": infer.path, "parallel": infer.parallel, "first_rank": infer.first_rank})


def placed_behind(yaml: ModelYaml, *others: ModelYaml) -> ModelYaml:
    """Place a layout on ranks behind those of the others."""
    return yaml.model_copy(update={"first_rank": max(other.ranks.stop for other in others)})


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


def check_workers(train: ModelYaml, infer: ModelYaml, placement: str, workers: int, scorers: int = 0) -> None:
    """Check that the sides of a split placement are all workers.

    workers: processes that were started. scorers: ranks that only score. Colocated layouts are checked one by one.
    """
    total = train.parallel.workers + infer.parallel.workers + scorers
    if placement == SPLIT and total != workers:
        found = f"trainer.placement is split, {train.path} has {factors(train)} and {infer.path} {factors(infer)}"
        more = f", {SCORER_FLAG} is {scorers}" if scorers else ""
        right = f"start {total} (msrun --worker_num={total}), or divide {workers} by "
        flags = f"{TRAINER_FLAG} and {GENERATOR_FLAG}"
        raise UserError(f"{found}{more}, and the workers started are {workers}; {right}{flags}.")


def planned_workers(train: ModelYaml, infer: ModelYaml, scorers: int = 0) -> int:
    """Count the workers that all layouts ask for. Raises UserError if colocated ones differ.

    scorers: ranks that only score.
    """
    ours, theirs = train.parallel.workers, infer.parallel.workers
    if infer.first_rank:
        return ours + theirs + scorers
    if ours != theirs:
        found = f"{infer.path}: parallel_config is of {theirs} workers, and that of {train.path} of {ours}"
        raise UserError(f"{found}; both run on the same workers, so give equal products.")
    return ours


def factors(yaml: ModelYaml) -> str:
    """Describe a layout's number of ranks as a product."""
    parallel = yaml.parallel
    axes = f"data_parallel {parallel.data_parallel} x model_parallel {parallel.model_parallel}"
    return f"{axes} x pipeline_stage {parallel.pipeline_stage} = {parallel.workers}"


def said_of_placement(yamls: Mapping[str, ModelYaml], staleness: int) -> str:
    """Say in one sentence which ranks train, generate and score, and when.

    yamls: of a split job. staleness: `trainer.staleness`.
    """
    train, infer, *score = (numbered("rank", yaml.ranks) for yaml in yamls.values())
    others = "".join(f", scoring on {ranks}" for ranks in score)
    split = f"trainer.placement split: training on {train} and generation on {infer}{others}"
    return f"{split}, at the same time" if staleness else f"{split}, in turn; with trainer.staleness=1 at the same time"
