"""Strategy files: read back, understood by MindSpore's own code, and MindSpore's understood by us."""

import numpy as np
import pytest
from layouts import full_arrays, shards_of

from mindrlhf.checkpoint.ckpt_file import write_ckpt
from mindrlhf.checkpoint.weight_source import index_weights, rank_folders
from mindrlhf.configs.model import ModelConfig
from mindrlhf.errors import UserError
from mindrlhf.parallel.layout import Layout, Placement, Sharding, model_layout
from mindrlhf.parallel.mesh import Mesh
from mindrlhf.reshard.strategy import read_strategy, save_strategies

ms = pytest.importorskip("mindspore")

MODEL = ModelConfig(
    vocab_size=16, hidden_size=16, intermediate_size=32, num_layers=3, num_heads=8, num_kv_heads=2, head_dim=4
)
TIED = MODEL.model_copy(update={"tie_word_embeddings": True})
SPARSE = {"family": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
EXPERTS = MODEL.model_copy(update={**SPARSE, "attention_bias": False})

LAYOUTS = {
    "one": model_layout(MODEL, Mesh()),
    "dp2": model_layout(MODEL, Mesh(dp=2)),
    "tp8": model_layout(MODEL, Mesh(tp=8), vocab_emb_dp=False),
    "dp2tp4": model_layout(MODEL, Mesh(dp=2, tp=4)),
    "pp2": model_layout(MODEL, Mesh(pp=2), offset=(0, 1)),
    "dp2tp2pp3": model_layout(TIED, Mesh(dp=2, tp=2, pp=3), vocab_emb_dp=False),
    "dp2ep2tp2": model_layout(EXPERTS, Mesh(dp=2, ep=2, tp=2)),
}


def message(entries: dict, stage: int = 0) -> bytes:
    """A strategy file by hand: parameter -> (device matrix, tensor map, optimizer shard step, optimizer shards)."""
    from mindspore.train.node_strategy_pb2 import ParallelStrategyMap

    content = ParallelStrategyMap(current_stage=1)
    operator = content.parallel_strategy_item.add(node_name="MatMul-op0")
    operator.parallel_strategys.stage = stage
    operator.parallel_strategys.parallel_strategy.add(dim=[1, 1])
    for name, (matrix, tensor_map, step, shards) in entries.items():
        entry = content.parallel_layout_item.add(param_name=name).parallel_layouts
        entry.dev_matrix.add(dim=matrix)
        for numbers in tensor_map if tensor_map and isinstance(tensor_map[0], list) else [tensor_map]:
            entry.tensor_map.add(dim=numbers)
        entry.param_split_shape.add()
        entry.field, entry.opt_weight_shard_step, entry.opt_weight_shard_size = 0, step, shards
    return content.SerializeToString()


@pytest.mark.parametrize("name", LAYOUTS)
def test_read_back(tmp_path, name):
    layout = LAYOUTS[name]
    files = save_strategies(tmp_path / "strategy", layout)
    assert [file.name for file in files] == [f"ckpt_strategy_rank_{rank}.ckpt" for rank in range(layout.size)]
    assert sorted(files) == sorted((tmp_path / "strategy").iterdir())
    strategy = read_strategy(tmp_path / "strategy")
    assert (strategy.stages, strategy.stage_ranks) == (layout.stages, layout.stage_ranks)
    assert strategy.layout(layout.shapes, "it") == layout
    ms.merge_pipeline_strategys(str(tmp_path / "strategy"), str(tmp_path / "merged.ckpt"))
    assert read_strategy(tmp_path / "merged.ckpt").layout(layout.shapes, "it") == layout


@pytest.mark.parametrize("name", LAYOUTS)
def test_mindspore_cuts_tensors_by_our_files_as_we_do(tmp_path, name):
    from mindspore.parallel._parallel_serialization import _build_searched_strategy, _convert_to_list
    from mindspore.parallel._tensor import _load_tensor

    layout = LAYOUTS[name]
    arrays = full_arrays(layout)
    shards = shards_of(layout, arrays)
    for rank, file in enumerate(save_strategies(tmp_path / "strategy", layout)):
        theirs = _convert_to_list(_build_searched_strategy(str(file)))
        assert theirs.keys() == shards[rank].keys()
        for parameter, (matrix, tensor_map, *_) in theirs.items():
            cut = _load_tensor(ms.Tensor(arrays[parameter]), matrix, tensor_map, rank_id=rank % layout.stage_ranks)
            np.testing.assert_array_equal(cut, shards[rank][parameter])


@pytest.mark.parametrize(
    ("matrix", "tensor_map", "step", "shards", "shape", "expected"),
    [
        ([2, 4], [0, -1], 4, 2, (64, 3), Sharding((2, 4), ((1, 0), ()))),
        ([2, 4], [-1, 0], 4, -1, (64, 8), Sharding((2, 4), ((0,), (1,)))),
        ([2, 4], [-1], 1, 8, (64,), Sharding((2, 4), ((0, 1),))),
        ([2, 4], [-1], 1, 4, (64,), Sharding((2, 4), ((1,),))),
        ([2, 4], [-1], 1, 2, (64,), Sharding((2, 2, 2), ((2,),))),
        ([4, 2], [0, -1], 2, 2, (64, 3), Sharding((2, 2, 2), ((2, 1), ()))),
        ([2, 2, 2], [1, -1], 1, 4, (64, 4), Sharding((2, 2, 2), ((1, 0, 2), ()))),
        ([2, 2, 2], [[1, 0], [-1]], 4, 2, (64, 4), Sharding((2, 2, 2), ((1, 2, 0), ()))),
        ([2, 2, 2], [[1, 0], [2]], 0, 0, (64, 4), Sharding((2, 2, 2), ((1, 2), (0,)))),
    ],
)
def test_optimizer_shards_and_several_axes_mean_what_they_mean_to_mindspore(
    tmp_path, matrix, tensor_map, step, shards, shape, expected
):
    (tmp_path / "strategy.ckpt").write_bytes(message({"w": (matrix, tensor_map, step, shards)}))
    layout = read_strategy(tmp_path / "strategy.ckpt").layout({"w": shape}, "it")
    assert layout.placements["w"].shardings == {0: expected}
    arrays = full_arrays(layout)
    (tmp_path / "source" / "rank_0").mkdir(parents=True)
    write_ckpt(tmp_path / "source" / "rank_0" / "full.ckpt", arrays.items(), "float32")
    ms.transform_checkpoints(
        str(tmp_path / "source"), str(tmp_path / "cut"), "part_", None, str(tmp_path / "strategy.ckpt")
    )
    theirs = {rank: index_weights(folder)["w"].read() for rank, folder in rank_folders(tmp_path / "cut").items()}
    for rank, held in enumerate(shards_of(layout, arrays)):
        np.testing.assert_array_equal(theirs[rank], held["w"])


def test_merged_file_beside_the_ranks_files_changes_nothing(tmp_path):
    folder = tmp_path / "strategy"
    save_strategies(folder, LAYOUTS["pp2"])
    ms.merge_pipeline_strategys(str(folder), str(folder / "merged_ckpt_strategy.ckpt"))
    assert read_strategy(folder).layout(LAYOUTS["pp2"].shapes, "it") == LAYOUTS["pp2"]


def test_optimizer_state_may_be_absent_or_present(tmp_path):
    entry = ([2], [0], 0, 0)
    (tmp_path / "s.ckpt").write_bytes(message({"a.weight": entry, "adam_m.a.weight": entry}))
    strategy = read_strategy(tmp_path / "s.ckpt")
    assert list(strategy.layout({"a.weight": (4,)}, "it").shapes) == ["a.weight"]
    both = {"a.weight": (4,), "adam_m.a.weight": (4,)}
    assert strategy.layout(both, "it").shapes == both
    with pytest.raises(UserError, match=r"s\.ckpt: is about a\.weight, which the file lacks"):
        strategy.layout({"adam_m.a.weight": (4,)}, "the file")


def test_strategy_of_another_model_is_refused_with_names(tmp_path):
    save_strategies(tmp_path / "s", LAYOUTS["tp8"])
    strategy = read_strategy(tmp_path / "s")
    deeper = model_layout(MODEL.model_copy(update={"num_layers": 4}), Mesh()).shapes
    with pytest.raises(UserError, match=r"s: says nothing of model\.layers\.3\..* and 9 more of other; give the"):
        strategy.layout(deeper, "other")
    shallower = model_layout(MODEL.model_copy(update={"num_layers": 2}), Mesh()).shapes
    with pytest.raises(UserError, match=r"s: is about model\.layers\.2\..* and 9 more, which other lacks"):
        strategy.layout(shallower, "other")
    other = LAYOUTS["tp8"].shapes | {"lm_head.weight": (20, 16)}
    with pytest.raises(UserError, match=r"cuts lm_head\.weight into \[8, 1\] parts, .* shape \[20, 16\] in other"):
        strategy.layout(other, "other")
    other = LAYOUTS["tp8"].shapes | {"lm_head.weight": (16,)}
    with pytest.raises(UserError, match=r"does not fit its shape \[16\]"):
        strategy.layout(other, "other")


def test_one_file_of_a_job_with_pipeline_stages_is_not_enough(tmp_path):
    first = save_strategies(tmp_path / "s", LAYOUTS["pp2"])[0]
    with pytest.raises(
        UserError, match=r"rank_0\.ckpt: says nothing of .*pipeline stages, the folder of all its files"
    ):
        read_strategy(first).layout(LAYOUTS["pp2"].shapes, "it")


GOOD = ([2, 2], [0], 0, 0)


@pytest.mark.parametrize(
    ("files", "match"),
    [
        ({}, r"strategy: holds no strategy file"),
        ({"a.ckpt": b"\xff\xff"}, r"a\.ckpt: is no MindSpore strategy file, or damaged"),
        ({"a.ckpt": message({})}, r"a\.ckpt: holds no parameter's layout"),
        ({"a.ckpt": message({"w": ([2, 2], [2], 0, 0)})}, r"a\.ckpt: the tensor map of w does not fit .*\[2, 2\]"),
        ({"a.ckpt": message({"w": ([2, 2], [0, 0], 0, 0)})}, r"a\.ckpt: the tensor map of w does not fit"),
        ({"a.ckpt": message({"w": ([2, 3], [0], 2, 5)})}, r"a\.ckpt: the optimizer shards of w do not fit .*\[2, 3\]"),
        ({"a.ckpt": message({"w": GOOD, "v": ([8], [0], 0, 0)})}, r"strategy: its parameters lie on \[4, 8\] ranks"),
        ({"a.ckpt": message({"w": GOOD}, stage=1)}, r"strategy: has the pipeline stages \[1\] only; .* all ranks"),
        (
            {"a.ckpt": message({"w": GOOD}), "b.ckpt": message({"w": ([2, 2], [1], 0, 0)})},
            r"b\.ckpt: cuts w of pipeline stage 0 in another way",
        ),
    ],
)
def test_bad_files_are_refused(tmp_path, files, match):
    folder = tmp_path / "strategy"
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_bytes(content)
    with pytest.raises(UserError, match=match):
        read_strategy(folder)


def test_no_such_strategy(tmp_path):
    with pytest.raises(UserError, match=r"nothing\.ckpt: does not exist; give a strategy file"):
        read_strategy(tmp_path / "nothing.ckpt")


def test_only_a_folder_of_strategy_files_is_replaced(tmp_path):
    folder = tmp_path / "strategy"
    save_strategies(folder, LAYOUTS["tp8"])
    save_strategies(folder, LAYOUTS["dp2"])
    assert len(list(folder.iterdir())) == 2
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match=r"notes\.txt: is no strategy file, so its folder is not replaced"):
        save_strategies(folder, LAYOUTS["tp8"])
    assert len(list(folder.iterdir())) == 3


def test_several_axes_on_one_dimension_are_not_written(tmp_path):
    layout = Layout(1, 4, {"w": Placement((4,), {0: Sharding((2, 2), ((0, 1),))})})
    with pytest.raises(ValueError, match="w: a dimension that several axes cut"):
        save_strategies(tmp_path / "s", layout)
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize("change", [{"name": b"\xff"}, {"dim": 0}, {"dim": 1 << 30}])
def test_a_file_with_a_bad_byte_is_refused(tmp_path, change):
    """A name that is no text, and device matrices that no job has."""
    from mindspore.train.node_strategy_pb2 import ParallelStrategyMap

    message = ParallelStrategyMap(current_stage=1)
    entry = message.parallel_layout_item.add(param_name="weight").parallel_layouts
    entry.field = entry.opt_weight_shard_step = entry.opt_weight_shard_size = 0
    entry.dev_matrix.add(dim=[change.get("dim", 1)])
    entry.tensor_map.add(dim=[-1])
    path = tmp_path / "ckpt_strategy_rank_0.ckpt"
    path.write_bytes(message.SerializeToString().replace(b"weight", b"weigh" + change.get("name", b"t")))
    with pytest.raises(
        UserError, match=r"rank_0\.ckpt: (is no MindSpore strategy file|the tensor map of weight does not fit)"
    ):
        read_strategy(path)
