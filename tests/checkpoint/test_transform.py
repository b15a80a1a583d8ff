"""`mindrlhf transform`: every kind of source to every kind of destination, against cutting full tensors in NumPy."""

import json
import multiprocessing
import shutil
import subprocess
import sys
import tracemalloc
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
from layouts import full_arrays, shards_of
from sharded_files import (
    ARRAYS,
    ARRAYS_TIED,
    MODEL,
    SOURCES,
    TIED,
    assert_shards,
    layout_of,
    listing,
    read_ranks,
    refuse,
    run,
    strategy_goal,
    write_full_file,
    write_hf_folder,
    write_shards,
    write_yaml,
    yaml_goal,
)
from training_states import arrays_of, save, states, stores

from mindrlhf.checkpoint.ckpt_file import write_ckpt
from mindrlhf.checkpoint.hf import read_hf_config
from mindrlhf.checkpoint.safetensors_file import write_safetensors
from mindrlhf.checkpoint.transform import write_ranks
from mindrlhf.checkpoint.weight_source import index_weights, open_full, open_sharded, rank_folders
from mindrlhf.configs.lora import Adapter
from mindrlhf.errors import UserError
from mindrlhf.models.parameters import parameter_table
from mindrlhf.parallel.layout import full_layout
from mindrlhf.reshard.strategy import save_strategies


@pytest.mark.parametrize("goal", [yaml_goal, strategy_goal])
@pytest.mark.parametrize("source", SOURCES)
def test_to_ranks(tmp_path, source, goal, capsys):
    arguments = SOURCES[source](tmp_path)
    before = listing(arguments[1]) if arguments[1].is_dir() else arguments[1].read_bytes()
    run(*arguments, *goal(tmp_path), "--dst_checkpoint", tmp_path / "out", "--prefix", "p_")
    assert_shards(read_ranks(tmp_path / "out"), shards_of(layout_of(dp=2, tp=4), ARRAYS))
    suffix = "ckpt" if source in ("ckpt", "strategy") else "safetensors"
    files = sorted(str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").rglob("*.*"))
    assert files == sorted(f"rank_{rank}/p_{rank}.{suffix}" for rank in range(8))
    assert before == (listing(arguments[1]) if arguments[1].is_dir() else arguments[1].read_bytes())
    assert capsys.readouterr().out == f"{tmp_path / 'out'}: 8 ranks, {len(ARRAYS)} parameters, float32\n"


def test_layouts_on_some_of_the_ranks(tmp_path):
    """A rank's folder has its number, and the parts of its place in the layout."""
    layout = replace(layout_of(tp=2, pp=2), ranks=(2, 3, 5, 7))
    weights = open_full(write_full_file(tmp_path / "full.safetensors"), MODEL)
    write_ranks(weights, layout, tmp_path / "out", prefix="p_", file_format="safetensors", advance=lambda done: None)
    folders = rank_folders(tmp_path / "out")
    assert folders.keys() == {*layout.ranks}
    found = [{name: t.read() for name, t in index_weights(folders[rank]).items()} for rank in layout.ranks]
    assert_shards(found, shards_of(layout_of(tp=2, pp=2), ARRAYS))
    again = open_sharded(tmp_path / "out", layout)
    for name, array in ARRAYS.items():
        np.testing.assert_array_equal(again.read(name), array)
    with pytest.raises(UserError, match=r"has no folder rank_4, and the layout is one of 4 ranks"):
        open_sharded(tmp_path / "out", replace(layout, ranks=(2, 3, 4, 5)))
    files = save_strategies(tmp_path / "strategy", layout)
    plain = save_strategies(tmp_path / "plain", layout_of(tp=2, pp=2))
    assert [path.name for path in files] == [f"ckpt_strategy_rank_{rank}.ckpt" for rank in layout.ranks]
    assert [path.read_bytes() for path in files] == [path.read_bytes() for path in plain]


@pytest.mark.parametrize("target", ["out.ckpt", "out.safetensors", "out"])
@pytest.mark.parametrize("source", ["yaml", "strategy"])
def test_to_an_uncut_checkpoint(tmp_path, source, target):
    arguments = SOURCES[source](tmp_path)
    if target == "out":
        shutil.copy(write_hf_folder(tmp_path / "hf") / "config.json", arguments[1])
    run(*arguments, "--dst_checkpoint", tmp_path / target)
    found = {name: tensor.read() for name, tensor in index_weights(tmp_path / target).items()}
    names = {spec.name: spec.hf_name if target == "out" else spec.name for spec in parameter_table(MODEL)}
    assert_shards([found], [{names[name]: array for name, array in ARRAYS.items()}])
    if target == "out":
        assert read_hf_config(tmp_path / target) == MODEL


def test_older_flags_put_an_uncut_checkpoint_on_rank_0(tmp_path):
    run(*SOURCES["strategy"](tmp_path), "--dst_checkpoint_dir", tmp_path / "out")
    assert [str(p.relative_to(tmp_path)) for p in (tmp_path / "out").rglob("*.*")] == ["out/rank_0/checkpoint_0.ckpt"]
    assert_shards(read_ranks(tmp_path / "out"), [ARRAYS])


@pytest.mark.parametrize("vocab_emb_dp", [True, False])
def test_tied_embedding_in_two_stages_and_uneven_stages(tmp_path, vocab_emb_dp):
    goal = layout_of(TIED, vocab_emb_dp, dp=1, tp=2, pp=2)
    run(
        "--src_checkpoint", write_hf_folder(tmp_path / "hf", TIED, ARRAYS_TIED),
        "--dst_strategy", write_yaml(tmp_path / "d.yaml", TIED, tp=2, pp=2, vocab_emb_dp=vocab_emb_dp),
        "--dst_checkpoint", tmp_path / "cut",
    )  # fmt: skip
    assert_shards(read_ranks(tmp_path / "cut"), shards_of(goal, ARRAYS_TIED))
    run(
        "--src_checkpoint", tmp_path / "cut",
        "--src_strategy", write_yaml(tmp_path / "d.yaml", TIED, tp=2, pp=2, vocab_emb_dp=vocab_emb_dp),
        "--dst_checkpoint", tmp_path / "back",
    )  # fmt: skip
    assert (tmp_path / "back/model.safetensors").read_bytes() == (tmp_path / "hf/model.safetensors").read_bytes()


def test_adapters_that_a_model_yaml_names_go_along(tmp_path):
    adapter = Adapter(2, 16, target_modules=("q_proj", "down_proj"))
    model = MODEL.model_copy(update={"adapter": adapter})
    goal, arrays = layout_of(model, tp=2, pp=2), full_arrays(layout_of(model))
    assert len(arrays) == len(ARRAYS) + 4 * MODEL.num_layers
    yaml = write_yaml(tmp_path / "d.yaml", tp=2, pp=2)
    named = {"lora_config": {"lora_rank": 2, "target_modules": ".*wq|.*w2"}}
    yaml.write_text(json.dumps(json.loads(yaml.read_text()) | named))
    source = write_full_file(tmp_path / "full.safetensors", arrays)
    run("--src_checkpoint", source, "--dst_strategy", yaml, "--dst_checkpoint", tmp_path / "cut")
    assert_shards(read_ranks(tmp_path / "cut"), shards_of(goal, arrays))
    back = ["--src_checkpoint", tmp_path / "cut", "--src_strategy", yaml, "--dst_checkpoint"]
    run(*back, tmp_path / "back.safetensors")
    assert (tmp_path / "back.safetensors").read_bytes() == source.read_bytes()
    refuse([*back, tmp_path / "hf"], "a Hugging Face folder has no adapters, .* ends in .safetensors or .ckpt")


def test_experts_that_are_spread_over_ranks(tmp_path):
    """By a model YAML there, by strategy files back."""
    sparse = {"family": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
    model = MODEL.model_copy(update={**sparse, "attention_bias": False, "qk_norm": True})
    goal, arrays = layout_of(model, dp=2, ep=2, tp=2), full_arrays(layout_of(model))
    yaml = write_yaml(tmp_path / "d.yaml", model, dp=4, tp=2)
    content = json.loads(yaml.read_text())
    del content["model"]["model_config"]["type"], content["model"]["model_config"]["qkv_has_bias"]
    named = {name: value for name, value in sparse.items() if name != "family"}
    content["model"]["model_config"] |= {"model_type": "qwen3_moe", **named, "norm_topk_prob": True}
    content["parallel_config"]["expert_parallel"] = 2
    yaml.write_text(json.dumps(content))
    source = write_full_file(tmp_path / "full.safetensors", arrays)
    run("--src_checkpoint", source, "--dst_strategy", yaml, "--dst_checkpoint", tmp_path / "cut")
    assert_shards(read_ranks(tmp_path / "cut"), shards_of(goal, arrays))
    strategy = save_strategies(tmp_path / "strategy", goal)[0].parent
    back = ["--src_checkpoint", tmp_path / "cut", "--src_strategy", strategy, "--dst_checkpoint"]
    run(*back, tmp_path / "back.safetensors")
    assert (tmp_path / "back.safetensors").read_bytes() == source.read_bytes()


@pytest.mark.parametrize("name", ["step_000003", "latest", "."])
def test_a_training_checkpoint_has_its_layout_in_itself(tmp_path, name):
    """Replicas share the writing, so that the files of a rank lack parameters that it holds."""
    config = (write_hf_folder(tmp_path / "hf") / "config.json").read_bytes()
    given = [replace(state, companions={"hf/config.json": config}) for state in states(3, dp=2, tp=2)]
    save(stores(tmp_path / "ckpt", 4), given)
    source, arrays = ["--src_checkpoint", tmp_path / "ckpt" / name, "--dst_checkpoint"], arrays_of(3)["model"]
    run(*source, tmp_path / "cut", *yaml_goal(tmp_path))
    assert_shards(read_ranks(tmp_path / "cut"), shards_of(layout_of(dp=2, tp=4), arrays))
    run(*source, tmp_path / "whole")
    found = index_weights(tmp_path / "whole")
    assert_shards([{s.name: found[s.hf_name].read() for s in parameter_table(MODEL)}], [arrays])


@pytest.mark.parametrize("file_format", ["ckpt", "safetensors"])
def test_each_tensor_keeps_its_type_bit_for_bit(tmp_path, file_format):
    rng = np.random.default_rng(0)
    arrays = {name: rng.standard_normal(array.shape).astype(np.float32) for name, array in ARRAYS.items()}
    types = {name: "float32" if "norm" in name else "bfloat16" for name in arrays}
    source, shapes = tmp_path / f"mixed.{file_format}", [(name, array.shape) for name, array in arrays.items()]
    if file_format == "ckpt":
        write_ckpt(source, arrays.items(), types)
    else:
        write_safetensors(source, shapes, arrays.values(), types, {})
    run("--src_checkpoint", source, "--dst_checkpoint", tmp_path / "cut", *yaml_goal(tmp_path))
    stored = index_weights(tmp_path / "cut" / "rank_3")
    assert {name: tensor.dtype for name, tensor in stored.items()} == types
    whole = tmp_path / f"back.{file_format}"
    run("--src_checkpoint", tmp_path / "cut", "--src_strategy", tmp_path / "dst.yaml", "--dst_checkpoint", whole)
    if file_format == "ckpt":
        assert whole.read_bytes() == source.read_bytes()
    back = index_weights(whole)
    for name, tensor in index_weights(source).items():
        assert back[name].dtype == tensor.dtype
        np.testing.assert_array_equal(back[name].read().view(np.uint32), tensor.read().view(np.uint32))


def test_optimizer_state_goes_along_where_both_strategies_have_a_place(tmp_path, caplog):
    layout = layout_of(tp=2)
    arrays = ARRAYS | {f"adam_m.{name}": -array for name, array in ARRAYS.items()}
    both = full_layout({name: array.shape for name, array in arrays.items()})
    placements = layout.placements | {f"adam_m.{name}": place for name, place in layout.placements.items()}
    with_state = type(layout)(1, 2, placements)
    write_shards(tmp_path / "cut", with_state, arrays)
    save_strategies(tmp_path / "with", with_state)
    save_strategies(tmp_path / "without", layout_of(tp=4))
    arguments = ["--src_checkpoint", tmp_path / "cut", "--src_strategy", tmp_path / "with"]
    run(*arguments, "--dst_checkpoint", tmp_path / "all.safetensors")
    assert index_weights(tmp_path / "all.safetensors").keys() == both.shapes.keys()
    run(*arguments, "--dst_checkpoint", tmp_path / "out", "--dst_strategy", tmp_path / "without")
    assert_shards(read_ranks(tmp_path / "out"), shards_of(layout_of(tp=4), ARRAYS))
    run(
        "--src_checkpoint", tmp_path / "cut", "--src_strategy", write_yaml(tmp_path / "s.yaml", tp=2),
        "--dst_checkpoint", tmp_path / "hf",
    )  # fmt: skip
    assert len(index_weights(tmp_path / "hf")) == len(ARRAYS)
    assert f"{len(ARRAYS)} tensors are not part of the model and are not used: adam_m.lm_head" in caplog.text


def test_several_processes_write_the_same(tmp_path, monkeypatch):
    seen = set()

    def advance(count):
        seen.update(process.pid for process in multiprocessing.active_children())

    weights = open_full(write_full_file(tmp_path / "full.safetensors"), None)
    for processes in (1, 2):
        write_ranks(
            weights, layout_of(tp=4), tmp_path / str(processes), prefix="", file_format="ckpt", advance=advance,
            processes=processes,
        )  # fmt: skip
        assert len(seen) == (0 if processes == 1 else 2)
    assert listing(tmp_path / "1") == listing(tmp_path / "2")


def test_one_rank_after_the_other(tmp_path):
    arguments = [*SOURCES["yaml"](tmp_path), *yaml_goal(tmp_path), "--dst_checkpoint_dir", tmp_path / "out"]
    for rank in range(8):
        run(*arguments, "--transform_by_rank", "True", "--rank_id", rank, "--world_size", 8)
        assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [f"rank_{r}" for r in range(rank + 1)]
    assert_shards(read_ranks(tmp_path / "out"), shards_of(layout_of(dp=2, tp=4), ARRAYS))
    with pytest.raises(UserError, match=r"rank_3: the folder exists and is not empty"):
        run(*arguments, "--transform_by_rank", "True", "--rank_id", 3)


BIG = MODEL.model_copy(
    update={"vocab_size": 4096, "hidden_size": 512, "num_layers": 4, "intermediate_size": 1408, "head_dim": 64}
)


@contextmanager
def peak_memory():
    """[bytes allocated at the worst moment of the block], NumPy's arrays included."""
    tracemalloc.start()
    try:
        start = tracemalloc.get_traced_memory()[0]
        peak = []
        yield peak
        peak.append(tracemalloc.get_traced_memory()[1] - start)
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("file_format", "dtype"),
    [
        ("ckpt", "bfloat16"),
        pytest.param("ckpt", "float32", marks=pytest.mark.slow),
        pytest.param("safetensors", "bfloat16", marks=pytest.mark.slow),
        pytest.param("safetensors", "float32", marks=pytest.mark.slow),
    ],
)
def test_memory_stays_below_twice_the_largest_tensor_and_one_output_file(tmp_path, dtype, file_format):
    shapes = full_layout({spec.name: spec.shape for spec in parameter_table(BIG)})
    arrays = {name: np.full(shape, 0.5, np.float32) for name, shape in shapes.shapes.items()}
    source = write_full_file(tmp_path / f"full.{file_format}", arrays, dtype)
    bound = 2 * max(array.nbytes for array in arrays.values()) // (1 if dtype == "float32" else 2)
    del arrays
    with peak_memory() as peak:
        run(
            "--src_checkpoint", source, "--dst_checkpoint", tmp_path / "cut",
            "--dst_strategy", write_yaml(tmp_path / "d.yaml", BIG, tp=4),
        )  # fmt: skip
    shard = max(path.stat().st_size for path in (tmp_path / "cut").rglob("*.*"))
    assert peak[0] < bound + shard < source.stat().st_size
    with peak_memory() as peak:
        run(
            "--src_checkpoint", tmp_path / "cut", "--src_strategy", tmp_path / "d.yaml",
            "--dst_checkpoint", tmp_path / f"back.{file_format}",
        )  # fmt: skip
    assert peak[0] < bound + source.stat().st_size / 2  # the output file, which is allowed here, is the whole
    assert (tmp_path / f"back.{file_format}").stat().st_size == source.stat().st_size


def test_the_tool_under_its_old_name(tmp_path, root):
    write_full_file(tmp_path / "full.safetensors")
    write_yaml(tmp_path / "d.yaml", tp=2)
    command = [sys.executable, root / "tools" / "transform_checkpoint.py", "--dst_strategy", "d.yaml"]
    command += ["--dst_checkpoint_dir", "out", "--transform_process_num", "2", "--src_checkpoint"]

    def tool(source):
        environment = {"PYTHONPATH": str(root)}
        return subprocess.run([*command, source], cwd=tmp_path, env=environment, capture_output=True, text=True)

    done = tool("full.safetensors")
    assert (done.returncode, done.stderr) == (0, "")
    assert_shards(read_ranks(tmp_path / "out"), shards_of(layout_of(tp=2), ARRAYS))
    refused = tool("nothing.ckpt")
    assert refused.returncode == 2
    assert refused.stderr.startswith("mindrlhf transform: nothing.ckpt: the path does not exist")
    assert refused.stderr.count("\n") == 1
