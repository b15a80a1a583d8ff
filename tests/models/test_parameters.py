"""The parameter table against checkpoints, MindFormers' own naming and published sizes."""

import json

import numpy as np
import pytest
from safetensors import safe_open
from small_model import small_config

from mindrlhf.checkpoint.hf import read_hf_config
from mindrlhf.configs.lora import Adapter
from mindrlhf.configs.model import ModelConfig
from mindrlhf.models.axes import TENSOR
from mindrlhf.models.parameters import Cut, parameter_count, parameter_table, trained_count

TINY = {
    "vocab_size": 32,
    "hidden_size": 12,
    "intermediate_size": 20,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 4,
}


@pytest.mark.parametrize("model", ["qwen2_tiny", "qwen3_tiny", "llama3_tiny"])
def test_table_is_exactly_what_a_checkpoint_holds(shared, model):
    folder = shared / "golden" / model
    with safe_open(folder / "model.safetensors", framework="np") as file:
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 - not a dict
    table = parameter_table(read_hf_config(folder))
    assert {spec.hf_name: spec.shape for spec in table} == shapes
    assert len({spec.name for spec in table}) == len(table)


def test_names_are_those_of_mindformers(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)  # importing mindformers writes a log folder into the current one
    llama = pytest.importorskip("mindformers").LlamaForCausalLM
    for spec in parameter_table(ModelConfig(**TINY)):
        if spec.name != "lm_head.weight":  # the one name that both worlds share
            assert llama.convert_name(spec.hf_name) == spec.name


QWEN3 = {"family": "qwen3", "qk_norm": True, "attention_bias": False}


@pytest.mark.parametrize(
    ("published", "vocab", "hidden", "inner", "layers", "heads", "kv_heads", "head_dim", "other"),
    [
        pytest.param(494_032_768, 151936, 896, 4864, 24, 14, 2, 64, {"tie_word_embeddings": True}, id="Qwen2.5-0.5B"),
        pytest.param(7_615_616_512, 152064, 3584, 18944, 28, 28, 4, 128, {}, id="Qwen2.5-7B"),
        pytest.param(32_763_876_352, 152064, 5120, 27648, 64, 40, 8, 128, {}, id="Qwen2.5-32B"),
        pytest.param(
            596_049_920, 151936, 1024, 3072, 28, 16, 8, 128, QWEN3 | {"tie_word_embeddings": True}, id="Qwen3-0.6B"
        ),
    ],
)
def test_sizes_of_published_models(published, vocab, hidden, inner, layers, heads, kv_heads, head_dim, other):
    config = ModelConfig(
        vocab_size=vocab, hidden_size=hidden, intermediate_size=inner, num_layers=layers, num_heads=heads,
        num_kv_heads=kv_heads, head_dim=head_dim, **other,
    )  # fmt: skip
    assert parameter_count(config) == published


def test_order_and_layers():
    table = parameter_table(ModelConfig(**TINY))
    assert [spec.layer for spec in table] == [None] + [0] * 12 + [1] * 12 + [None, None]
    assert table[0].kind == "embedding"
    assert [spec.name for spec in table[-2:]] == ["model.norm_out.weight", "lm_head.weight"]
    tied = parameter_table(ModelConfig(**TINY, tie_word_embeddings=True))
    assert tied[1:] == table[1:-1]
    assert (table[0].place, table[0].inside) == ("first", False)
    assert (tied[0].place, tied[0].inside) == ("ends", True)  # the last stage's ranks use it as the head


def test_weight_decay_is_for_matrices_and_an_untied_head():
    decays = {spec.name.removeprefix("model.layers.0."): spec.decays for spec in parameter_table(ModelConfig(**TINY))}
    for name in ("attention.wq.weight", "attention.wo.weight", "feed_forward.w2.weight", "lm_head.weight"):
        assert decays[name]
    for name in (
        "model.tok_embeddings.embedding_weight",
        "attention.wq.bias",
        "ffn_norm.weight",
        "model.norm_out.weight",
    ):
        assert not decays[name]


@pytest.mark.parametrize("name", ["qwen2_tiny", "qwen3_tiny"])
def test_adapters_rows_are_exactly_what_peft_holds(shared, name):
    folder = shared / "golden" / f"{name}_lora"
    with safe_open(folder / "adapter_model.safetensors", framework="np") as file:
        shapes = {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118 - not a dict
    raw = json.loads((folder / "adapter_config.json").read_text())
    patterns = {key: raw[key] for key in ("rank_pattern", "alpha_pattern")}
    adapter = Adapter(raw["r"], raw["lora_alpha"], raw["use_rslora"], tuple(raw["target_modules"]), **patterns)
    base = read_hf_config(shared / "golden" / name)
    table = parameter_table(base.model_copy(update={"adapter": adapter}))
    assert {f"base_model.model.{spec.hf_name}": spec.shape for spec in table if spec.trains} == shapes
    kept = [spec for spec in table if not spec.trains]
    assert [(spec.name, spec.shape) for spec in kept] == [(s.name, s.shape) for s in parameter_table(base)]
    for weight, a, b in zip(table, table[1:], table[2:], strict=False):
        if a.kind == "lora_a":
            assert (weight.kind, b.kind) == ("matrix", "lora_b")
            modules = [one.hf_tensors[0].module for one in (weight, a, b)]
            assert modules == modules[:1] * 3
            assert (a.shape[1], b.shape[0]) == weight.shape[::-1]
            assert a.scale == b.scale == adapter.of(modules[0])[1]
            assert a.decays
            assert b.decays


def test_adapters_are_cut_as_their_weights():
    config = ModelConfig(**TINY, adapter=Adapter(2, 4))
    specs = {spec.name.removeprefix("model.layers.0."): spec for spec in parameter_table(config)}
    cuts = {name: spec.cuts for name, spec in specs.items() if spec.layer == 0 and spec.adapts}
    assert cuts["attention.wq.lora_a"] == cuts["attention.wk.lora_a"] == cuts["feed_forward.w1.lora_a"] == ()
    assert cuts["attention.wo.lora_b"] == cuts["feed_forward.w2.lora_b"] == ()
    assert cuts["attention.wq.lora_b"] == cuts["feed_forward.w3.lora_b"] == (Cut(TENSOR, 0),)
    assert cuts["attention.wv.lora_b"] == (Cut(TENSOR, 0, config.num_kv_heads),)
    assert cuts["attention.wo.lora_a"] == cuts["feed_forward.w2.lora_a"] == (Cut(TENSOR, 1),)
    assert all(spec.inside for spec in specs.values() if spec.adapts)


def test_trained_parameters_of_an_adapter():
    adapter = Adapter(2, 4, target_modules=("v_proj", "down_proj"))
    adapted = ModelConfig(**TINY, adapter=adapter)
    assert trained_count(adapted) == 2 * (2 * (12 + 8) + 2 * (20 + 12))
    assert parameter_count(adapted) == parameter_count(adapted.base) + trained_count(adapted)
    assert trained_count(adapted.base) == parameter_count(adapted.base)
    assert adapted.as_critic() == adapted.base.as_critic()


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_shards_compute_what_the_whole_does(family):
    """Cutting leaves whole heads on each rank and needs one sum after the row-parallel matrices."""
    qwen3 = family == "qwen3"
    config = ModelConfig(**TINY, family=family, qk_norm=qwen3, attention_bias=not qwen3)
    rng = np.random.default_rng(0)
    specs = {s.name.removeprefix("model.layers.0."): s for s in parameter_table(config) if s.layer == 0}
    whole = {name: rng.normal(size=spec.shape) for name, spec in specs.items()}

    def values_and_feed_forward(weights, x):
        """A linear stand-in for attention (values only, which keeps the head structure) and the feed-forward."""
        values = weights["attention.wv.weight"] @ x
        if not qwen3:
            values = values + weights["attention.wv.bias"]
        repeats = config.num_heads // config.num_kv_heads
        heads = np.repeat(values.reshape(-1, config.head_dim), repeats, axis=0).reshape(-1)
        gated = np.tanh(weights["feed_forward.w1.weight"] @ x) * (weights["feed_forward.w3.weight"] @ x)
        return weights["attention.wo.weight"] @ heads + weights["feed_forward.w2.weight"] @ gated

    def shard(name, rank):
        cuts = specs[name].cuts
        return np.split(whole[name], 2, axis=cuts[0].dim)[rank] if cuts else whole[name]

    x = rng.normal(size=config.hidden_size)
    parts = [values_and_feed_forward({name: shard(name, rank) for name in whole}, x) for rank in (0, 1)]
    np.testing.assert_allclose(sum(parts), values_and_feed_forward(whole, x), rtol=1e-12)
    unsharded = {name for name, spec in specs.items() if not spec.cuts}
    assert all(specs[name].kind == "norm" for name in unsharded)


def test_equal_models_share_one_table():
    """Tables of models with experts have tens of thousands of tensors, and everything asks for the table."""
    assert parameter_table(small_config()) is parameter_table(small_config())
    assert parameter_table(small_config(num_layers=1)) is not parameter_table(small_config())
