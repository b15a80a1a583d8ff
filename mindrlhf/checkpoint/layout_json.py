"""Conversion of layouts to JSON values and back, so that checkpoints describe themselves."""

from typing import Any

from mindrlhf.parallel.layout import Layout, Placement, Sharding

MAX_RANKS = 1 << 14  # a file that claims more is damaged


def layout_to_json(layout: Layout) -> dict[str, Any]:
    """Convert a layout to JSON values; parameters share equal shardings."""
    known: dict[tuple, int] = {}
    placements = {}
    for name, placement in layout.placements.items():
        stages = {
            str(stage): known.setdefault((sharding.grid, sharding.cuts), len(known))
            for stage, sharding in placement.shardings.items()
        }
        placements[name] = {"shape": list(placement.shape), "stages": stages}
    shardings = [{"grid": list(grid), "cuts": [list(axes) for axes in cuts]} for grid, cuts in known]
    sizes = {"stages": layout.stages, "stage_ranks": layout.stage_ranks}
    return {**sizes, "shardings": shardings, "placements": placements}


def layout_from_json(content: dict[str, Any]) -> Layout:
    """Convert JSON values of `layout_to_json` back to a layout.

    Any of several errors is raised for other content.
    """
    shardings = [
        Sharding(_counts(entry["grid"]), tuple(_counts(axes) for axes in entry["cuts"]))
        for entry in content["shardings"]
    ]
    placements = {
        name: Placement(
            _counts(entry["shape"]), {int(stage): shardings[index] for stage, index in entry["stages"].items()}
        )
        for name, entry in content["placements"].items()
    }
    stages, stage_ranks = _counts([content["stages"], content["stage_ranks"]])
    if not 0 < stages * stage_ranks <= MAX_RANKS:
        raise ValueError(f"{stages} stages of {stage_ranks} ranks")
    return Layout(stages, stage_ranks, placements)


def _counts(values: list[int]) -> tuple[int, ...]:
    for value in values:
        if type(value) is not int or value < 0:
            raise ValueError(f"{value!r} is no count")
    return tuple(values)
