"""The parameter table against checkpoints, MindFormers' own naming and published sizes."""

import numpy as np
import pytest
from safetensors import safe_open

from mindrlhf.checkpoint.hf import read_hf_config
from mindrlhf.configs.model import ModelConfig
from mindrlhf.models.parameters import parameter_count, parameter_table

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


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_shards_compute_what_the_whole_does(family):
    """Cutting by `dim` leaves whole heads on each rank and needs one sum after the row-parallel matrices."""
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
        dim = specs[name].dim
        return whole[name] if dim is None else np.split(whole[name], 2, axis=dim)[rank]

    x = rng.normal(size=config.hidden_size)
    parts = [values_and_feed_forward({name: shard(name, rank) for name in whole}, x) for rank in (0, 1)]
    np.testing.assert_allclose(sum(parts), values_and_feed_forward(whole, x), rtol=1e-12)
    unsharded = {name for name, spec in specs.items() if spec.dim is None}
    assert all(specs[name].kind == "norm" for name in unsharded)
