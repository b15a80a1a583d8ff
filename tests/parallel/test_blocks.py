"""Blocks whose weights are gathered one at a time: every parameter once, and buffers that alike layers share."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from layouts import model_configs, spreads
from oracle_routing import SPARSE
from small_model import SmallModel

from mindrlhf.configs.lora import Adapter
from mindrlhf.configs.model_yaml import ModelYaml, ParallelSettings
from mindrlhf.models.axes import EXPERT
from mindrlhf.models.parameters import EMBEDDING, HEAD, parameter_table
from mindrlhf.parallel.blocks import buffer_shapes, cut_blocks, kept_slices, whole_shape
from mindrlhf.parallel.partition import Partition


def parts_of(model, dp: int = 2, tp: int = 1, ep: int = 1) -> list[Partition]:
    parallel = ParallelSettings(
        data_parallel=dp,
        model_parallel=tp,
        expert_parallel=ep,
        enable_parallel_optimizer=True,
        optimizer_level="level3",
    )
    return Partition.every_rank(ModelYaml(path="train.yaml", parallel=parallel), model)


@st.composite
def jobs(draw) -> list[Partition]:
    model = draw(model_configs())
    ep = draw(spreads(model))
    widths = [
        tp
        for tp in (1, 2, 4)
        if model.num_heads % tp == 0 and not (model.num_kv_heads % tp and tp % model.num_kv_heads)
    ]
    return parts_of(model, dp=ep * draw(st.integers(2, 3)), tp=draw(st.sampled_from(widths)), ep=ep)


@given(jobs())
def test_replicas_divide_what_divides_and_each_element_counts_once(parts):
    for spec in parameter_table(parts[0].model):
        kept = np.zeros(spec.shape, int)
        counted = np.zeros(spec.shape, int)
        for part in parts:
            kept[part.slices(spec)] += 1
            if part.counts(spec):
                counted[part.slices(spec)] += 1
        assert (counted == 1).all(), spec.name
        assert kept.min() == kept.max(), spec.name
        whole = np.zeros(spec.shape, int)
        for part in parts:
            whole[part.gathered.slices(part.rank, spec.name)] += 1
        shared = parts[0].mesh.dp if EXPERT in {cut.axis for cut in spec.cuts} else parts[0].mesh.replicas
        divides = whole_shape(parts[0], spec.name)[0] % shared == 0
        assert kept.max() * (shared if divides else 1) == whole.max(), spec.name


@given(jobs())
def test_blocks_hold_each_parameter_and_ranks_keep_slices_of_its_buffer(parts):
    for part in parts:
        blocks = cut_blocks(part)
        table = [spec.name for spec in part.specs]
        found = [spec.name for block in blocks for spec in block.specs]
        assert set(found) == set(table)
        twice = {name for name in found if found.count(name) > 1}
        assert twice <= {EMBEDDING}
        shapes = buffer_shapes(part)
        for block in blocks:
            own = [block.buffers[spec.name] for spec in block.specs]
            assert len(set(own)) == len(own)  # two parameters of a block never have one buffer
            for spec in block.specs:
                shape = shapes[block.buffers[spec.name]]
                assert shape == whole_shape(part, spec.name)
                assert np.empty(shape)[kept_slices(part, spec.name)].shape == part.shape(spec)


def test_layers_share_the_buffers_of_one_and_both_ends_of_one_table():
    part = parts_of(SmallModel.random(num_layers=5).config)[0]
    first, *layers, last = cut_blocks(part)
    assert [list(block.layers) for block in (first, *layers, last)] == [[], [0], [1], [2], [3], [4]]
    assert [block.alike for block in (first, *layers, last)] == [0, 1, 1, 1, 1, 5]
    assert {name for block in layers for name in block.buffers.values()} <= set(last.buffers.values())
    assert last.buffers[HEAD] == first.buffers[EMBEDDING] == EMBEDDING
    sizes = {spec.name: spec.size for spec in part.specs}
    layer = sum(size for name, size in sizes.items() if ".layers.0." in name)
    buffers = sum(int(np.prod(shape)) for shape in buffer_shapes(part).values())
    assert buffers == layer + sizes[EMBEDDING] + sizes["model.norm_out.weight"]


def test_layers_with_other_parameters_have_buffers_of_their_own():
    """Of layers with experts, and of layers with experts' adapters."""
    model = SmallModel.random(**SPARSE | {"num_layers": 4}).config
    part = parts_of(model)[0]
    assert {spec.place for spec in part.specs if "experts" in spec.name} != set(range(4))
    kinds = {block.layers.start: block.alike for block in cut_blocks(part)[1:-1]}
    dense = [number for number in kinds if number not in model.expert_layers]
    assert len({kinds[number] for number in dense}) == 1
    assert {kinds[number] for number in dense}.isdisjoint(kinds[number] for number in kinds if number not in dense)


def test_what_does_not_train_has_no_buffer_of_gradients():
    part = parts_of(SmallModel.random(num_layers=3, adapter=Adapter(4, 8)).config)[0]
    trained = buffer_shapes(part, trained=True)
    assert trained
    assert all("lora_" in name for name in trained)
    assert all("lora_" in spec.name for block in cut_blocks(part) for spec in block.trained)


@pytest.mark.parametrize("dp", [1, 2])
def test_ranks_share_only_with_others(dp):
    part = parts_of(SmallModel.random().config, dp)[0]
    assert (part.gathered is None) == (dp == 1)
    assert not part.shared_optimizer
    assert part.copy == tuple(range(dp))
