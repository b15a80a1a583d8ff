"""Made-up training states over any layout, written by every rank's store, for the tests of checkpoints."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from math import prod
from pathlib import Path

import numpy as np
from layouts import full_arrays, shards_of
from sharded_files import MODEL, layout_of

from mindrlhf.checkpoint.resume import Checkpoint
from mindrlhf.checkpoint.store import CheckpointStore
from mindrlhf.checkpoint.training_state import ShardGroup, TrainingState
from mindrlhf.parallel.layout import Layout, Placement, Sharding

TOKEN = "0123abcd"
KINDS = ("model", "exp_avg", "exp_avg_sq")


def arrays_of(step: int, model=MODEL) -> dict[str, dict[str, np.ndarray]]:
    """kind -> name -> full array; different in every element, kind and step."""
    base = full_arrays(layout_of(model))
    return {kind: {name: a + 1e6 * step + 1e5 * i for name, a in base.items()} for i, kind in enumerate(KINDS)}


def sharded_over_dp(layout: Layout, dp: int) -> Layout:
    """The layout with the first dimension cut along the data-parallel axis too, where that divides it."""

    def cut(placement: Placement) -> Placement:
        shardings = {}
        for stage, sharding in placement.shardings.items():
            cuts = ((0, *sharding.cuts[0]), *sharding.cuts[1:])
            divides = placement.shape[0] % prod(sharding.grid[axis] for axis in cuts[0]) == 0
            shardings[stage] = Sharding(sharding.grid, cuts) if divides and dp > 1 else sharding
        return Placement(placement.shape, shardings)

    return replace(layout, placements={name: cut(placement) for name, placement in layout.placements.items()})


def states(step: int, model=MODEL, dp: int = 1, **mesh) -> list[TrainingState]:
    """Each rank's state; the moments are sharded over dp as well."""
    weights = layout_of(model, dp=dp, **mesh)
    moments = sharded_over_dp(weights, dp)
    arrays = arrays_of(step, model)
    layouts = {kind: weights if kind == "model" else moments for kind in KINDS}
    parts = {kind: shards_of(layout, arrays[kind]) for kind, layout in layouts.items()}
    return [
        TrainingState(
            step,
            {kind: ShardGroup(layout, parts[kind][rank]) for kind, layout in layouts.items()},
            {"updates": 3 * step, "stream": {"position": 8 * step}},
            {"settings": {"seed": 5}},
            {"hf/config.json": b"{}\n", "hf/tokenizer.json": b"[1, 2]\n", "more.npz": b"more"},
        )
        for rank in range(weights.size)
    ]


def stores(folder: Path, size: int = 1, **options) -> list[CheckpointStore]:
    """One for each rank."""
    return [CheckpointStore(folder, rank, range(size), TOKEN, **options) for rank in range(size)]


def save(stores: list[CheckpointStore], states: list[TrainingState], **options) -> None:
    """Every rank saves at the same time, as in a job; the first rank's failure is raised."""
    with ThreadPoolExecutor(len(stores)) as pool:
        jobs = [pool.submit(store.save, state, **options) for store, state in zip(stores, states, strict=True)]
        for job in jobs:
            job.result()


def save_step(folder: Path, step: int, **mesh) -> Path:
    """One checkpoint, written in the ordinary way."""
    given = states(step, **mesh)
    save(stores(folder, len(given)), given)
    return folder / f"step_{step:06d}"


def read_all(checkpoint: Checkpoint, layout: Layout, kind: str) -> list[dict[str, np.ndarray]]:
    """For each rank of a layout, what it reads."""
    weights = checkpoint.weights(kind, layout.shapes)
    return [{name: weights.read(name, part) for name, part in layout.shards(rank)} for rank in range(layout.size)]


def assert_holds(folder: Path, step: int, model=MODEL) -> Checkpoint:
    """The checkpoint is sound and is that of the step, every number and every file of it."""
    checkpoint = Checkpoint.open(folder)
    checkpoint.verify()
    whole = layout_of(model)
    for kind, expected in arrays_of(step, model).items():
        (found,) = read_all(checkpoint, whole, kind)
        assert found.keys() == expected.keys()
        for name, array in expected.items():
            assert found[name].tobytes() == array.tobytes(), name
    assert checkpoint.step == step
    assert checkpoint.counters == {"updates": 3 * step, "stream": {"position": 8 * step}}
    assert checkpoint.run == {"settings": {"seed": 5}}
    assert (checkpoint.hf_folder / "tokenizer.json").read_bytes() == b"[1, 2]\n"
    assert (checkpoint.companion("more.npz"), checkpoint.companion("other")) == (b"more", None)
    return checkpoint
