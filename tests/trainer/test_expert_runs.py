"""Runs of a model with experts, end to end: train, resume, export, adapters, and other commands on the result."""

import json

import jobs
import numpy as np
import pytest
from safetensors.numpy import load_file
from small_model import EXPERTS, random_arrays

from mindrlhf.checkpoint.hf import save_hf
from mindrlhf.checkpoint.peft import read_adapter
from mindrlhf.configs.model import ModelConfig
from mindrlhf.data.tokenizer import Tokenizer
from mindrlhf.models.parameters import parameter_table

ROUTER = "model.layers.1.mlp.gate.weight"
SETTINGS = ("algorithm.beta=0", "optimizer.lr=1e-2", "trainer.total_steps=2", "trainer.loggers=[jsonl]")


@pytest.fixture(scope="module")
def base(task, tmp_path_factory):
    """An HF directory with random weights."""
    sizes = {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 64, "max_position_embeddings": 2048}
    heads = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "tie_word_embeddings": True}
    config = ModelConfig(**EXPERTS | sizes | heads)
    arrays = random_arrays(config)
    folder = tmp_path_factory.mktemp("experts") / "hf"
    tensors = [(spec, arrays[spec.name]) for spec in parameter_table(config)]
    save_hf(folder, config, tensors, tokenizer=Tokenizer.from_path(task.folder))
    return folder


@pytest.fixture(scope="module")
def train(task, base):
    def run(folder, *settings):
        files = {"load_sft_checkpoint_infer": base, "sft_path_infer": None, "sft_path_train": None}
        argv = task.train(folder, *SETTINGS, *settings, **files)
        jobs.train_apart(argv, timeout=300)
        return jobs.Run(folder)

    return run


@pytest.fixture(scope="module")
def frozen(train, tmp_path_factory):
    """A run whose routers stay, with the balancing loss and checkpoints."""
    settings = ("train.freeze_router=True", "train.load_balancing_coef=0.01", "trainer.save_freq=1")
    return train(tmp_path_factory.mktemp("frozen"), *settings)


def test_all_weights_change_but_a_frozen_router(frozen, base):
    first = load_file(base / "model.safetensors")
    assert [name for name in first if np.array_equal(first[name], frozen.weights[name])] == [ROUTER]


def test_metrics_have_the_load(frozen):
    for row in frozen.metrics:
        shares = [row[f"actor/expert_load/1/{expert}"] for expert in range(6)]
        assert sum(shares) == pytest.approx(1)
        assert 0 < row["actor/expert_entropy/1"] < 1
        assert row["actor/expert_busiest/1"] == max(shares)
        assert row["actor/load_balancing"] == pytest.approx(0.01 * row["actor/expert_balance"], rel=1e-4)


def test_a_checkpoint_is_exported_whole(frozen, tmp_path):
    checkpoint = frozen.folder / "ckpt" / "step_000002"
    assert jobs.call(["export", "--checkpoint", checkpoint, "--output", tmp_path / "hf"]) == 0
    stored = (tmp_path / "hf" / "model.safetensors").read_bytes()
    assert stored == (frozen.folder / "ckpt" / "hf" / "model.safetensors").read_bytes()


def test_gguf_is_refused_by_name(frozen, tmp_path, capsys):
    folder = frozen.folder / "ckpt" / "hf"
    assert jobs.call(["export", "--checkpoint", folder, "--gguf", tmp_path / "model.gguf"]) == 2
    assert "is a qwen3_moe model, and GGUF files have" in capsys.readouterr().err


def test_adapters_of_experts(train, base, tmp_path):
    run = train(tmp_path, "lora.rank=2", "lora.alpha=4")
    adapter = read_adapter(run.folder / "ckpt" / "hf_adapter")
    assert f"{ROUTER.removesuffix('.weight')}.lora_A.weight" not in adapter.arrays
    assert adapter.arrays["model.layers.1.mlp.experts.5.up_proj.lora_B.weight"].shape == (24, 2)
    first, name = load_file(base / "model.safetensors"), "model.layers.1.mlp.experts.{}.gate_proj.weight"
    assert any(not np.array_equal(first[name.format(i)], run.weights[name.format(i)]) for i in range(6))
    assert np.array_equal(first[ROUTER], run.weights[ROUTER])
    assert json.loads((run.folder / "ckpt" / "hf" / "config.json").read_text())["num_experts"] == 6
