"""Layouts: who holds what, by hand for small models and by property for all."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from layouts import full_arrays, model_configs, model_layouts, shardings, shards_of
from stacked import STACK, stacked_config

from mindrlhf.configs.lora import Adapter
from mindrlhf.configs.model import ModelConfig
from mindrlhf.configs.model_settings import ModelSettings
from mindrlhf.configs.model_yaml import ModelYaml, ParallelSettings
from mindrlhf.configs.vision import VisionConfig
from mindrlhf.errors import UserError
from mindrlhf.models.parameters import parameter_table
from mindrlhf.parallel.layout import Layout, Placement, Sharding, full_layout, model_layout, split_layers, yaml_layout
from mindrlhf.parallel.mesh import Mesh
from mindrlhf.reshard.strategy import read_strategy, save_strategies

MODEL = ModelConfig(
    vocab_size=24, hidden_size=16, intermediate_size=32, num_layers=5, num_heads=8, num_kv_heads=2, head_dim=4
)
EMBEDDING, NORM, HEAD = "model.tok_embeddings.embedding_weight", "model.norm_out.weight", "lm_head.weight"


def rows(layout, rank, name):
    part = layout.slices(rank, name)
    return None if part is None else (part[0].start, part[0].stop)


def test_a_stage_holds_its_layers_and_the_ends_the_rest():
    layout = model_layout(MODEL, Mesh(pp=2, dp=1, tp=2), offset=(1, 0))
    held = [{name for name, _ in layout.shards(rank)} for rank in range(4)]
    assert held[0] == held[1]
    assert held[2] == held[3]
    assert not held[0] & held[2]
    assert {name.split(".")[2] for name in held[0] if ".layers." in name} == {"0", "1", "2"}
    assert {name.split(".")[2] for name in held[2] if ".layers." in name} == {"3", "4"}
    assert {name for name in held[0] if ".layers." not in name} == {EMBEDDING}
    assert {name for name in held[2] if ".layers." not in name} == {NORM, HEAD}
    assert list(layout.shapes.items()) == [(spec.name, spec.shape) for spec in parameter_table(MODEL)]


def test_columns_rows_and_whole_parameters():
    layout = model_layout(MODEL, Mesh(dp=2, tp=2))
    prefix = "model.layers.0."
    for rank, half in ((0, 0), (1, 1), (2, 0), (3, 1)):
        assert layout.slices(rank, prefix + "feed_forward.w1.weight") == (
            slice(16 * half, 16 * half + 16),
            slice(0, 16),
        )
        assert layout.slices(rank, prefix + "feed_forward.w2.weight") == (
            slice(0, 16),
            slice(16 * half, 16 * half + 16),
        )
        assert layout.slices(rank, prefix + "attention.wo.weight") == (slice(0, 16), slice(16 * half, 16 * half + 16))
        assert layout.slices(rank, prefix + "attention.wq.bias") == (slice(16 * half, 16 * half + 16),)
        assert layout.slices(rank, prefix + "attention_norm.weight") == (slice(0, 16),)
        assert layout.shape(rank, HEAD) == (12, 16)


@pytest.mark.parametrize(("tp", "expected"), [(2, [0, 1]), (4, [0, 0, 1, 1]), (8, [0, 0, 0, 0, 1, 1, 1, 1])])
def test_more_ranks_than_key_value_heads_share_them(tp, expected):
    layout = model_layout(MODEL, Mesh(dp=2, tp=tp))
    for name, rank in itertools.product(("wk.weight", "wv.weight", "wk.bias", "wv.bias"), range(2 * tp)):
        head = expected[rank % tp]
        assert rows(layout, rank, f"model.layers.0.attention.{name}") == (4 * head, 4 * head + 4)
    queries = 32 // tp
    for rank in range(2 * tp):
        first = rank % tp * queries
        assert rows(layout, rank, "model.layers.0.attention.wq.weight") == (first, first + queries)
        assert first // 16 == expected[rank % tp]  # each query head meets the key head that it belongs to


@pytest.mark.parametrize("vocab_emb_dp", [True, False])
@pytest.mark.parametrize("tied", [True, False])
def test_embedding_and_head(vocab_emb_dp, tied):
    model = MODEL.model_copy(update={"tie_word_embeddings": tied, "num_layers": 4})
    layout = model_layout(model, Mesh(pp=2, tp=2), vocab_emb_dp=vocab_emb_dp)
    cut, whole = [(0, 12), (12, 24)], [(0, 24), (0, 24)]
    embedding = whole if vocab_emb_dp else cut
    assert [rows(layout, rank, EMBEDDING) for rank in range(4)] == embedding + (embedding if tied else [None, None])
    if tied:
        assert HEAD not in layout.shapes
    else:
        assert [rows(layout, rank, HEAD) for rank in range(4)] == [None, None, *cut]


def test_two_axes_cut_one_parameter(monkeypatch, tmp_path):
    model = stacked_config(monkeypatch)
    layout = model_layout(model, Mesh(dp=2, tp=2))
    for rank in range(4):
        dp, tp = divmod(rank, 2)
        assert layout.slices(rank, STACK) == (slice(2 * dp, 2 * dp + 2), slice(24 * tp, 24 * tp + 24), slice(0, 32))
    assert STACK.replace("1", "0") not in layout.shapes
    save_strategies(tmp_path, layout)
    found = read_strategy(tmp_path).layout(layout.shapes, "the model")
    assert [found.slices(rank, STACK) for rank in range(4)] == [layout.slices(rank, STACK) for rank in range(4)]


@settings(deadline=None)
@given(st.data())
def test_every_stage_group_holds_every_element_and_replicas_hold_the_same(data):
    config = data.draw(model_configs())
    layout = data.draw(model_layouts(config))
    arrays = full_arrays(layout)
    shards = shards_of(layout, arrays)
    for name, array in arrays.items():
        stages = [range(s * layout.stage_ranks, (s + 1) * layout.stage_ranks) for s in range(layout.stages)]
        holding = [ranks for ranks in stages if name in shards[ranks[0]]]
        assert holding
        for ranks in holding:
            found, counts = np.unique(np.concatenate([shards[r][name].ravel() for r in ranks]), return_counts=True)
            np.testing.assert_array_equal(found, array.ravel())
            assert len(set(counts)) == 1


@settings(deadline=None)
@given(st.data())
def test_sharding_agrees_with_cutting_along_one_axis_after_the_other(data):
    ranks = data.draw(st.sampled_from((1, 2, 4, 6, 12)))
    sharding = data.draw(shardings(ranks, 2))
    array = np.arange(np.prod(sharding.parts) * 6).reshape(2 * sharding.parts[0], 3 * sharding.parts[1])
    for rank in range(ranks):
        place, expected = np.unravel_index(rank, sharding.grid), array
        for dim, axes in enumerate(sharding.cuts):
            for axis in axes:
                expected = np.split(expected, sharding.grid[axis], dim)[place[axis]]
        np.testing.assert_array_equal(array[sharding.slices(rank, array.shape)], expected)


def test_full_layout_is_one_rank_with_everything():
    layout = full_layout({"a": (2, 3), "b": ()})
    assert layout.size == 1
    assert dict(layout.shards(0)) == {"a": (slice(0, 2), slice(0, 3)), "b": ()}


@pytest.mark.parametrize(
    ("layers", "stages", "offset", "expected"),
    [
        (4, 1, 0, [4]),
        (4, 1, (7,), [4]),
        (8, 4, 0, [2, 2, 2, 2]),
        (8, 4, (0, 0, 0, 0), [2, 2, 2, 2]),
        (8, 4, (-1, 1, 1, -1), [1, 3, 3, 1]),
        (7, 2, (1, 0), [4, 3]),
        (7, 2, (0, 1), [3, 4]),
        (5, 4, (-1, 1, 1, 0), [0, 2, 2, 1]),
        (3, 2, (-1, 2), [0, 3]),
    ],
)
def test_offset_moves_layers_between_stages(layers, stages, offset, expected):
    ranges = split_layers(layers, stages, offset)
    assert [len(r) for r in ranges] == expected
    assert [layer for r in ranges for layer in r] == list(range(layers))


@pytest.mark.parametrize(
    ("layers", "stages", "offset", "match"),
    [
        (7, 2, 0, r"offset is 0, and 7 layers on 2 stages ask for a list of 2 numbers with the sum 1, like \[1, 0\]"),
        (7, 2, 1, r"offset is 1, and .* a list of 2 numbers"),
        (8, 2, (1, 0), r"offset is \[1, 0\], and .* the sum 0, like \[0, 0\]"),
        (8, 2, (1, 0, -1), r"a list of 2 numbers with the sum 0, like \[0, 0\]"),
        (6, 3, (1, -2, 1), r"like \[0, 0, 0\], that leaves layers to every stage between"),
        (4, 2, (-3, 3), r"offset is \[-3, 3\], and 4 layers on 2 stages"),
    ],
)
def test_offset_that_does_not_fit_is_refused(layers, stages, offset, match):
    with pytest.raises(UserError, match=match):
        split_layers(layers, stages, offset)


@pytest.mark.slow  # for importing MindFormers alone
@pytest.mark.parametrize("offset", [0, (0, 0, 0), (1, 0, 0), (0, -1, 2), (-1, 1, 0), (-2, 3, 1)])
@pytest.mark.parametrize("layers", [6, 7, 8])
def test_offset_means_what_it_means_to_mindformers(tmp_path, monkeypatch, layers, offset):
    monkeypatch.chdir(tmp_path)  # MindFormers makes its log folder where it is imported
    pytest.importorskip("mindformers")
    from mindformers.modules.transformer.transformer import TransformerOpParallelConfig
    from mindformers.parallel_core.training_graph.transformer.utils import LayerSetting

    def theirs():
        config = TransformerOpParallelConfig(pipeline_stage=3, data_parallel=1, model_parallel=1)
        setting = LayerSetting(layers, list(offset) if offset else 0, config)
        return [[layer for layer in range(layers) if setting.pp_ids[layer] == stage] for stage in range(3)]

    try:
        expected = theirs()
    except ValueError:
        with pytest.raises(UserError):
            split_layers(layers, 3, offset)
    else:
        assert [list(r) for r in split_layers(layers, 3, offset)] == expected


def yaml(offset=0, **parallel):
    return ModelYaml(path="train.yaml", model=ModelSettings(offset=offset), parallel=ParallelSettings(**parallel))


def test_layout_of_a_yaml():
    settings = yaml((1, 0), data_parallel=2, model_parallel=4, pipeline_stage=2, micro_batch_num=2, vocab_emb_dp=False)
    expected = model_layout(MODEL, Mesh(dp=2, tp=4, pp=2), offset=(1, 0), vocab_emb_dp=False)
    assert yaml_layout(settings, MODEL) == expected


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        (yaml(pipeline_stage=2, micro_batch_num=2), r"train\.yaml: model\.model_config\.offset is 0, and 5 layers"),
        (
            yaml(pipeline_stage=6, micro_batch_num=6),
            r"train\.yaml: .*pipeline_stage 6 is more than the model's 5 layers",
        ),
        (yaml(model_parallel=3), r"train\.yaml: .*model_parallel 3 does not divide num_heads 8"),
    ],
)
def test_yaml_that_does_not_fit_the_model_is_refused(settings, match):
    with pytest.raises(UserError, match=match):
        yaml_layout(settings, MODEL)


def test_what_cannot_be_a_layout_is_refused():
    with pytest.raises(ValueError, match="not 1 stages of 2 ranks"):
        Layout(1, 2, {"a": Placement((4,), {0: Sharding((4,), ((0,),))})})
    with pytest.raises(ValueError, match="not 1 stages of 4 ranks"):
        Layout(1, 4, {"a": Placement((4,), {1: Sharding((4,), ((0,),))})})
    with pytest.raises(ValueError, match=r"\(6,\) cannot be cut into \(4,\)"):
        Layout(1, 4, {"a": Placement((6,), {0: Sharding((4,), ((0,),))})})
    with pytest.raises(ValueError, match="no stage holds it"):
        Layout(1, 1, {"a": Placement((6,), {})})
    with pytest.raises(ValueError, match="3 tensor-parallel ranks"):
        model_layout(MODEL, Mesh(tp=3))
    layout = model_layout(MODEL, Mesh(pp=5))
    with pytest.raises(ValueError, match="rank 5 is outside"):
        layout.slices(5, HEAD)
    with pytest.raises(ValueError, match="rank 0 holds no part of lm_head"):
        layout.shape(0, HEAD)


def test_a_pipeline_stage_without_adapters_is_refused():
    parallel = ParallelSettings(pipeline_stage=2, micro_batch_num=2)
    yaml = ModelYaml(path="train.yaml", model=ModelSettings(), parallel=parallel, context={"device_target": "CPU"})
    model = MODEL.model_copy(update={"num_layers": 2, "adapter": Adapter(2, 4, target_modules=r".*layers\.0\..*")})
    with pytest.raises(
        UserError, match=r"train.yaml: pipeline stage 1 has nothing that trains, .* \(lora.target_modules\), or set"
    ):
        yaml_layout(yaml, model)
    yaml_layout(yaml, model.model_copy(update={"adapter": Adapter(2, 4, target_modules=("v_proj",))}))


def test_a_stage_with_frozen_parts_alone_is_refused():
    vision = VisionConfig(hidden_size=32, num_heads=2, sections=(1, 1))
    model = MODEL.model_copy(update={"num_layers": 2, "family": "qwen2_5_vl", "vision": vision, "frozen": ("text",)})
    parallel = ParallelSettings(pipeline_stage=2, micro_batch_num=2)
    yaml = ModelYaml(path="train.yaml", model=ModelSettings(), parallel=parallel, context={"device_target": "CPU"})
    with pytest.raises(UserError, match=r"pipeline stage 1 has nothing that trains, .* text out of train\.freeze"):
        yaml_layout(yaml, model)
    yaml_layout(yaml, model.model_copy(update={"frozen": ("vision", "merger")}))
