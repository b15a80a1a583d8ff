"""State of a run for an exact resume: arrays and counters of each rank.

Random numbers need no state: rollouts are keyed by (seed, step, prompt, sample, position) and the order of prompts by
(seed, epoch), so that step and cursor are enough.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

import numpy as np

from mindrlhf.model_roles import POLICY
from mindrlhf.parallel.layout import Layout, Placement, Sharding

MAX_RANKS = 1 << 14  # a file that claims more is damaged
WEIGHTS = POLICY.checkpoint  # the kind of arrays that most readers want


@dataclass(frozen=True, eq=False)
class ShardGroup:
    """A rank's part of one kind of array: weights, or an optimizer moment.

    layout: of all ranks, the same on each. shards: name -> this rank's part: float32, bfloat16, or 8-bit codes with
    their scales under a name of their own (`optimizer_state.SCALES`); written through on resume.
    """

    layout: Layout
    shards: Mapping[str, np.ndarray]


@dataclass(frozen=True, eq=False)
class TrainingState:
    """State of a run between two steps, on one rank.

    All fields except step and groups come from rank 0.
    step: steps done. groups: kind -> arrays; the kinds become file names. counters: plain JSON values to set again on
    resume (data cursor, optimizer updates). run: plain JSON values that describe the run (settings, model, versions).
    companions: path in the checkpoint -> content of further files (tokenizer, the model's configuration).
    """

    step: int
    groups: Mapping[str, ShardGroup]
    counters: Mapping[str, Any] = field(default_factory=dict)
    run: Mapping[str, Any] = field(default_factory=dict)
    companions: Mapping[str, bytes] = field(default_factory=dict)


def check_alike(saved: Any, own: Any) -> None:
    """Compare the keys and types of a saved state with a new one.

    Raises ValueError for a difference. Where the new state has None, any plain value is allowed; counts that are not
    negative have to stay so.
    """
    if isinstance(own, Mapping):
        if not isinstance(saved, Mapping) or not own.keys() <= saved.keys():
            raise ValueError(f"{saved!r:.80} is not one of {', '.join(own)}")
        for key, value in own.items():
            check_alike(saved[key], value)
        return
    number = isinstance(own, int | float) and not isinstance(own, bool)
    kinds = (int,) if type(own) is int else (int, float) if number else (str, int, float, bool, type(None))
    wrong = type(saved) not in kinds or (isinstance(saved, float) and not isfinite(saved))
    if wrong or (number and (saved < 0 <= own or saved > 1 << 53)):
        raise ValueError(f"{saved!r:.80} stands where a run has {own!r:.80}")


def layout_to_json(layout: Layout) -> dict[str, Any]:
    """Convert a layout to JSON values; parameters share equal shardings."""
    known: dict[Sharding, int] = {}
    placements = {}
    for name, placement in layout.placements.items():
        stages = {str(stage): known.setdefault(each, len(known)) for stage, each in placement.shardings.items()}
        placements[name] = {"shape": list(placement.shape), "stages": stages}
    shardings = [{"grid": list(each.grid), "cuts": list(map(list, each.cuts))} for each in known]
    sizes = {"stages": layout.stages, "stage_ranks": layout.stage_ranks}
    if layout.ranks != tuple(range(layout.size)):
        sizes["ranks"] = list(layout.ranks)
    return {**sizes, "shardings": shardings, "placements": placements}


def layout_from_json(content: dict[str, Any]) -> Layout:
    """Convert JSON values of `layout_to_json` back; raises one of several errors for others."""
    shardings = [Sharding(_counts(entry["grid"]), tuple(map(_counts, entry["cuts"]))) for entry in content["shardings"]]
    placements = {}
    for name, entry in content["placements"].items():
        stages = {int(stage): shardings[index] for stage, index in entry["stages"].items()}
        placements[name] = Placement(_counts(entry["shape"]), stages)
    stages, stage_ranks = _counts([content["stages"], content["stage_ranks"]])
    if not 0 < stages * stage_ranks <= MAX_RANKS:
        raise ValueError(f"{stages} stages of {stage_ranks} ranks")
    return Layout(stages, stage_ranks, placements, _counts(content.get("ranks", [])))


def _counts(values: list[int]) -> tuple[int, ...]:
    for value in values:
        if type(value) is not int or value < 0:
            raise ValueError(f"{value!r} is no count")
    return tuple(values)
