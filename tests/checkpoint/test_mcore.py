"""Checkpoints under the names of MindFormers' Megatron-style models, spelled here once more."""

import jobs
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from small_model import EXPERTS, random_arrays, small_config

from mindrlhf.checkpoint.hf import save_hf
from mindrlhf.checkpoint.hf_tensors import split
from mindrlhf.checkpoint.weight_source import fingerprint, open_weights
from mindrlhf.errors import UserError
from mindrlhf.models.parameters import parameter_table

MODELS = {
    "qwen2": {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8},
    "qwen3": {"family": "qwen3", "attention_bias": False, "qk_norm": True, "num_heads": 6, "num_kv_heads": 2},
    "experts": EXPERTS,
}
SAME = {
    "embed_tokens.weight": "word_embeddings.weight",
    "model.norm.weight": "decoder.final_layernorm.weight",
    "lm_head": "output_layer",
    "self_attn.q_norm": "self_attention.q_layernorm",
    "self_attn.k_norm": "self_attention.k_layernorm",
    "self_attn.o_proj": "self_attention.linear_proj",
    "post_attention_layernorm": "pre_mlp_layernorm",
    "mlp.down_proj": "mlp.linear_fc2",
    "mlp.gate.": "mlp.router.",
    "model.layers": "decoder.layers",
}


def write_mcore(hf: dict[str, np.ndarray], config, path) -> None:
    """Hugging Face's tensors as MindFormers' conversion of a whole model leaves them."""
    hf, stored = dict(hf), {}
    for layer in range(config.num_layers):
        ours, theirs = f"model.layers.{layer}.", f"decoder.layers.{layer}."
        for ending in ("weight", "bias") if config.attention_bias else ("weight",):
            q, k, v = (hf.pop(f"{ours}self_attn.{one}_proj.{ending}") for one in "qkv")
            rows = []
            each = config.num_heads // config.num_kv_heads * config.head_dim
            for head in range(config.num_kv_heads):
                own = slice(head * config.head_dim, (head + 1) * config.head_dim)
                rows += [q[head * each : (head + 1) * each], k[own], v[own]]
            stored[f"{theirs}self_attention.linear_qkv.{ending}"] = np.concatenate(rows)
        if layer in config.expert_layers:
            maps = {name: [] for name in ("gate_proj", "up_proj", "down_proj")}
            for expert in range(config.num_experts):
                for name, found in maps.items():
                    found.append(hf.pop(f"{ours}mlp.experts.{expert}.{name}.weight").T)
            both = np.concatenate([np.stack(maps["gate_proj"]), np.stack(maps["up_proj"])], axis=2)
            stored[f"{theirs}mlp.experts.weight1"] = both.reshape(-1, both.shape[2])
            stored[f"{theirs}mlp.experts.weight2"] = np.concatenate(maps["down_proj"])
        else:
            gate, up = (hf.pop(f"{ours}mlp.{name}_proj.weight") for name in ("gate", "up"))
            stored[f"{theirs}mlp.linear_fc1.weight"] = np.stack([gate, up], axis=1).reshape(-1, gate.shape[1])
    for name, array in hf.items():
        for old, new in SAME.items():
            name = name.replace(old, new)
        stored[name.replace("model.word", "embedding.word")] = array
    save_file({name: np.ascontiguousarray(array) for name, array in stored.items()}, path)


@pytest.fixture(params=MODELS)
def model(request, tmp_path):
    """A model in Hugging Face's folder `hf`, and in the file `mcore.safetensors`."""
    config = small_config(**MODELS[request.param])
    arrays = random_arrays(config)
    save_hf(tmp_path / "hf", config, [(spec, arrays[spec.name]) for spec in parameter_table(config)])
    write_mcore(load_file(tmp_path / "hf" / "model.safetensors"), config, tmp_path / "mcore.safetensors")
    return config, arrays


def test_every_weight_and_part_is_read(tmp_path, model):
    config, arrays = model
    source = open_weights(tmp_path / "mcore.safetensors", config)
    table = parameter_table(config)
    for spec in table:
        np.testing.assert_array_equal(source.read(spec.name), arrays[spec.name], err_msg=spec.name)
        part = tuple(slice(size // 4, size - size // 4) for size in spec.shape)
        np.testing.assert_array_equal(source.read(spec.name, part), arrays[spec.name][part], err_msg=spec.name)
    assert fingerprint(table, source.read) == fingerprint(table, open_weights(tmp_path / "hf", config).read)


def test_convert_gives_hugging_faces_folder(tmp_path, model):
    paths = ["--torch_ckpt_dir", tmp_path / "again", "--mindspore_ckpt_path", tmp_path / "mcore.safetensors"]
    assert jobs.call(["convert", "--reverse", *paths, "--config_path", tmp_path / "hf"]) == 0
    written, first = (load_file(tmp_path / name / "model.safetensors") for name in ("again", "hf"))
    assert written.keys() == first.keys()
    assert all(np.array_equal(written[name], array) for name, array in first.items())


def test_what_does_not_fit_is_refused(tmp_path, model):
    config, _ = model
    stored = load_file(tmp_path / "mcore.safetensors")
    name = "decoder.layers.0.self_attention.linear_qkv.weight"
    for change, message in (
        ({name: stored[name][:-1]}, "tensor decoder.layers.0.self_attention.linear_qkv.weight has shape"),
        ({"decoder.layers.9.mlp.linear_fc2.weight": stored[name]}, "holds decoder.layers.9.mlp.linear_fc2.weight, and"),
        ({name: None}, f"the weight {name} is missing"),
    ):
        changed = {one: array for one, array in (stored | change).items() if array is not None}
        save_file(changed, tmp_path / "changed.safetensors")
        with pytest.raises(UserError, match=message):
            open_weights(tmp_path / "changed.safetensors", config)


def theirs(model, config, hf: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What MindFormers' converters of a model make of a Hugging Face checkpoint."""
    from mindformers.parallel_core.transformer_config import TransformerConfig

    sizes = {"num_layers": config.num_layers, "hidden_size": config.hidden_size, "kv_channels": config.head_dim}
    heads = {"num_attention_heads": config.num_heads, "num_query_groups": config.num_kv_heads}
    experts = {"num_moe_experts": config.num_experts, "moe_ffn_hidden_size": config.moe_intermediate_size}
    known = sizes | heads | (experts if config.num_experts else {})
    described = TransformerConfig(**known, add_bias_linear=False)
    stored = {}
    for converter in model.weight_converters:
        if hasattr(converter, "set_model_config"):
            converter.set_model_config(described)
            converter.optimizer_parallel_size = 1
        for layer in range(config.num_layers if "{}" in converter.hf_names[0] else 1):
            given = {}
            for name in converter.hf_names:
                if name.count("{}") == 2:  # all experts of a layer, one below the other
                    rows = [hf[name.format(layer, expert)] for expert in range(config.num_experts)]
                    given[name.format(layer, 0)] = np.concatenate(rows)
                elif name.format(layer) in hf:
                    given[name.format(layer)] = hf[name.format(layer)]
            stored |= converter(given) or {}
    return stored


@pytest.mark.parametrize("kind", ["qwen3", "experts"])
def test_a_checkpoint_of_mindformers_own_conversion_is_read(tmp_path, monkeypatch, kind):
    monkeypatch.chdir(tmp_path)  # importing mindformers writes a log folder into the current one
    pytest.importorskip("mindformers")
    from mindformers.models.qwen3.utils import Qwen3PreTrainedModel
    from mindformers.models.qwen3_moe.utils import Qwen3MoePreTrainedModel

    config = small_config(**MODELS[kind] | {"decoder_sparse_step": 1, "tie_word_embeddings": False})
    arrays = random_arrays(config)
    hf = {name: array for spec in parameter_table(config) for name, array in split(spec, arrays[spec.name])}
    stored = theirs(Qwen3MoePreTrainedModel if config.num_experts else Qwen3PreTrainedModel, config, hf)
    save_file({name: np.ascontiguousarray(array) for name, array in stored.items()}, tmp_path / "mcore.safetensors")
    source = open_weights(tmp_path / "mcore.safetensors", config)
    for name, array in arrays.items():
        np.testing.assert_array_equal(source.read(name), array, err_msg=name)
