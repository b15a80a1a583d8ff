"""Checkpoints in files, whole and cut, for the tests of `mindrlhf transform`; written by nothing of what is tested."""

import argparse
import json

import numpy as np
import pytest
from layouts import full_arrays, shards_of

from mindrlhf.checkpoint.ckpt_file import write_ckpt
from mindrlhf.checkpoint.hf import save_hf
from mindrlhf.checkpoint.safetensors_file import write_safetensors
from mindrlhf.checkpoint.weight_source import index_weights, rank_folders
from mindrlhf.commands import transform
from mindrlhf.configs.model import ModelConfig
from mindrlhf.errors import UserError
from mindrlhf.models.parameters import parameter_table
from mindrlhf.parallel.layout import model_layout
from mindrlhf.parallel.mesh import Mesh
from mindrlhf.reshard.strategy import save_strategies

MODEL = ModelConfig(
    vocab_size=16, hidden_size=16, intermediate_size=32, num_layers=3, num_heads=8, num_kv_heads=2, head_dim=4,
    rms_norm_eps=1e-6, rope_theta=1e4, max_position_embeddings=64, eos_token_ids=(1,),
)  # fmt: skip
TIED = MODEL.model_copy(update={"tie_word_embeddings": True})
ARRAYS = full_arrays(model_layout(MODEL, Mesh()))
ARRAYS_TIED = full_arrays(model_layout(TIED, Mesh()))


def run(*arguments):
    parser = argparse.ArgumentParser()
    transform.add_arguments(parser)
    transform.run(parser.parse_args([str(argument) for argument in arguments]))


def layout_of(model=MODEL, vocab_emb_dp=False, **mesh):
    return model_layout(model, Mesh(**mesh), offset=(1, 0) if mesh.get("pp") == 2 else 0, vocab_emb_dp=vocab_emb_dp)


def write_yaml(path, model=MODEL, dp=1, tp=1, pp=1, vocab_emb_dp=False):
    """A model YAML; JSON is YAML too."""
    model_config = {
        "type": "LlamaConfig", "vocab_size": model.vocab_size, "hidden_size": model.hidden_size,
        "num_layers": model.num_layers, "num_heads": model.num_heads, "n_kv_heads": model.num_kv_heads,
        "head_dim": model.head_dim, "intermediate_size": model.intermediate_size, "qkv_has_bias": True,
        "rms_norm_eps": model.rms_norm_eps,
        "theta": model.rope_theta, "max_position_embedding": 64, "eos_token_id": 1,
        "tie_word_embeddings": model.tie_word_embeddings, "offset": [1, 0] if pp == 2 else 0,
    }  # fmt: skip
    parallel = {"data_parallel": dp, "model_parallel": tp, "pipeline_stage": pp, "micro_batch_num": pp}
    parallel |= {"vocab_emb_dp": vocab_emb_dp}
    content = {"model": {"model_config": model_config}, "parallel_config": parallel}
    path.write_text(json.dumps(content))
    return path


def write_full_file(path, arrays=ARRAYS, dtype="float32"):
    if path.suffix == ".ckpt":
        write_ckpt(path, arrays.items(), dtype)
    else:
        shapes = [(name, array.shape) for name, array in arrays.items()]
        write_safetensors(path, shapes, arrays.values(), dtype, {"format": "ms"})
    return path


def write_hf_folder(path, model=MODEL, arrays=ARRAYS, **more):
    save_hf(path, model, ((spec, arrays[spec.name]) for spec in parameter_table(model)), **more)
    return path


def write_shards(path, layout, arrays=ARRAYS, file_format="safetensors"):
    """rank_R folders with one file each."""
    for rank, shards in enumerate(shards_of(layout, arrays)):
        (path / f"rank_{rank}").mkdir(parents=True)
        write_full_file(path / f"rank_{rank}" / f"old_{rank}.{file_format}", shards)
    return path


def read_ranks(path):
    found = rank_folders(path)
    return [{name: t.read() for name, t in index_weights(found[rank]).items()} for rank in range(len(found))]


def assert_shards(found, expected):
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.keys() == theirs.keys()
        for name, array in theirs.items():
            np.testing.assert_array_equal(ours[name], array)


def listing(path):
    """Everything in a folder, hidden files too, with content."""
    return {str(p.relative_to(path)): p.read_bytes() if p.is_file() else None for p in sorted(path.rglob("*"))}


def refuse(arguments, match):
    with pytest.raises(UserError, match=match) as caught:
        run(*arguments)
    assert "\n" not in str(caught.value)
    assert str(caught.value).endswith((".", ")."))


SOURCES = {
    "ckpt": lambda folder: ["--src_checkpoint", write_full_file(folder / "full.ckpt")],
    "safetensors": lambda folder: ["--src_checkpoint", write_full_file(folder / "full.safetensors")],
    "hf": lambda folder: ["--src_checkpoint", write_hf_folder(folder / "hf", max_shard_bytes=8000)],
    "yaml": lambda folder: [
        "--src_checkpoint", write_shards(folder / "cut", layout_of(tp=4, pp=2)),
        "--src_strategy", write_yaml(folder / "src.yaml", tp=4, pp=2),
    ],
    "strategy": lambda folder: [
        "--src_checkpoint", write_shards(folder / "cut", layout_of(dp=2, tp=2, pp=2), file_format="ckpt"),
        "--src_strategy", save_strategies(folder / "src_strategy", layout_of(dp=2, tp=2, pp=2))[0].parent,
    ],
}  # fmt: skip


def yaml_goal(folder):
    return ["--dst_strategy", write_yaml(folder / "dst.yaml", dp=2, tp=4)]


def strategy_goal(folder):
    return ["--dst_strategy", save_strategies(folder / "dst_strategy", layout_of(dp=2, tp=4))[0]]
