"""Moments in fewer bits: every rank stores its own blocks, and any layout reads the numbers."""

import numpy as np
import pytest
from layouts import shards_of
from sharded_files import layout_of
from training_states import read_all, save, states, stores

from mindrlhf.checkpoint.resume import Checkpoint
from mindrlhf.errors import UserError
from mindrlhf.optimizer_state import SCALES, decode, encode, form_of

MESHES = [{}, {"tp": 2}, {"dp": 2}, {"dp": 2, "tp": 2}, {"tp": 2, "pp": 2}]
KINDS = {"exp_avg": "first", "exp_avg_sq": "second"}


def coded(shards, kind):
    """The parts of a rank as it keeps them, and the numbers that they stand for."""
    kept, numbers = {}, {}
    for name, array in shards.items():
        kept[name] = numbers[name] = array
        if form_of("int8", array.shape) == "int8":
            kept[name], kept[f"{name}{SCALES}"] = encode(array, KINDS[kind])
            numbers[name] = decode(kept[name], kept[f"{name}{SCALES}"])
    return kept, numbers


def saved(folder, **mesh):
    """A checkpoint with coded moments; returns it with the numbers of each kind, whole, by name."""
    given = states(3, **mesh)
    whole = {kind: {name: np.zeros(shape, np.float32) for name, shape in layout_of().shapes.items()} for kind in KINDS}
    for rank, state in enumerate(given):
        for kind in KINDS:
            group = state.groups[kind]
            kept, numbers = coded(group.shards, kind)
            group.shards.clear()
            group.shards.update(kept)
            for name, array in numbers.items():
                whole[kind][name][group.layout.slices(rank, name)] = array
    save(stores(folder, len(given)), given)
    return Checkpoint.open(folder / "step_000003"), whole


@pytest.mark.parametrize("mesh", MESHES)
def test_any_layout_reads_the_numbers_of_all_ranks(tmp_path, mesh):
    checkpoint, whole = saved(tmp_path, **mesh)
    checkpoint.verify()
    for other in MESHES:
        layout = layout_of(**other)
        for kind, arrays in whole.items():
            for found, expected in zip(read_all(checkpoint, layout, kind), shards_of(layout, arrays), strict=True):
                assert found.keys() == expected.keys()
                assert all(found[name].tobytes() == array.tobytes() for name, array in expected.items())


def test_codes_without_scales_are_refused(tmp_path):
    (given,) = states(3)
    shards = given.groups["exp_avg"].shards
    kept, _ = coded(shards, "exp_avg")
    name = next(name for name in shards if f"{name}{SCALES}" in kept)
    shards[name] = kept[name]
    save(stores(tmp_path), [given])
    with pytest.raises(UserError, match=rf"the layout of exp_avg: KeyError '{name}\.scales'"):
        Checkpoint.open(tmp_path / "step_000003").weights("exp_avg")
