"""Hugging Face folders: configuration read, whole folders written and read back."""

import json
import os

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

from mindrlhf.checkpoint.hf import read_hf_config, save_hf
from mindrlhf.checkpoint.stored_tensor import decode, encode
from mindrlhf.checkpoint.weight_source import open_weights
from mindrlhf.configs.model import ModelConfig
from mindrlhf.errors import UserError
from mindrlhf.models.parameters import parameter_table


@pytest.fixture(scope="module")
def config():
    return ModelConfig(
        vocab_size=32, hidden_size=16, intermediate_size=20, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=4,
        eos_token_ids=(1, 2), pad_token_id=0,
    )  # fmt: skip


@pytest.fixture(scope="module")
def tensors(config):
    rng = np.random.default_rng(0)
    return [(spec, rng.normal(size=spec.shape).astype(np.float32)) for spec in parameter_table(config)]


@pytest.fixture(scope="module")
def qwen3(config):
    return config.model_copy(update={"family": "qwen3", "qk_norm": True, "attention_bias": False, "head_dim": 6})


def write_config(folder, config=None, generation=None):
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))


BASE = {
    "model_type": "qwen2",
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@pytest.mark.parametrize(
    ("config_eos", "generation", "expected"),
    [
        (151645, {"eos_token_id": [151645, 151643]}, (151645, 151643)),  # Qwen2.5-Instruct
        (151643, {"eos_token_id": 151643}, (151643,)),
        (151645, {}, (151645,)),
        (151645, None, (151645,)),
        (None, {"eos_token_id": 7}, (7,)),
        ([3, 4], {"eos_token_id": [4, 5]}, (3, 4, 5)),
    ],
)
def test_stop_tokens_of_both_files(tmp_path, config_eos, generation, expected):
    write_config(tmp_path, BASE | {"eos_token_id": config_eos}, generation)
    assert read_hf_config(tmp_path).eos_token_ids == expected


def test_padding_of_the_generation_config_fills_a_gap(tmp_path):
    write_config(tmp_path, BASE, {"pad_token_id": 5, "bos_token_id": 6})
    assert (read_hf_config(tmp_path).pad_token_id, read_hf_config(tmp_path).bos_token_id) == (5, 6)
    write_config(tmp_path, BASE | {"pad_token_id": 0})
    assert read_hf_config(tmp_path).pad_token_id == 0


def test_damaged_configurations_are_named(tmp_path):
    with pytest.raises(UserError, match=r"config\.json: there is no such file"):
        read_hf_config(tmp_path)
    for wrong in ("<eos>", True, 2**40):
        write_config(tmp_path, BASE, {"eos_token_id": [wrong]})
        with pytest.raises(UserError, match=rf"generation_config\.json: eos_token_id.0 is '?{wrong}'?, and must be a"):
            read_hf_config(tmp_path)
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(UserError, match=r"generation_config\.json: is not valid JSON"):
        read_hf_config(tmp_path)
    (tmp_path / "config.json").write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match=r"config\.json, line 1: not UTF-8 text"):
        read_hf_config(tmp_path)
    write_config(tmp_path, BASE | {"model_type": "gemma"})
    with pytest.raises(UserError, match=r"config\.json: model_type is 'gemma'"):
        read_hf_config(tmp_path)


def test_written_folder_is_read_by_the_library(tmp_path, config, tensors):
    save_hf(tmp_path / "new" / "model", config, tensors)
    folder = tmp_path / "new" / "model"
    assert sorted(os.listdir(folder)) == ["config.json", "generation_config.json", "model.safetensors"]
    assert os.listdir(tmp_path / "new") == ["model"]
    read = load_file(folder / "model.safetensors")
    assert set(read) == {spec.hf_name for spec, _ in tensors}
    for spec, array in tensors:
        np.testing.assert_array_equal(read[spec.hf_name], array)
    with safe_open(folder / "model.safetensors", framework="np") as file:
        assert file.metadata() == {"format": "pt"}
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == [1, 2]


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("max_shard_bytes", [10**9, 3000])
def test_round_trip(tmp_path, config, tensors, dtype, max_shard_bytes):
    save_hf(tmp_path / "a", config, tensors, dtype, max_shard_bytes=max_shard_bytes)
    assert json.loads((tmp_path / "a" / "config.json").read_text())["torch_dtype"] == dtype
    assert read_hf_config(tmp_path / "a") == config
    source = open_weights(tmp_path / "a", config)
    assert source.dtype == dtype
    for spec, array in tensors:
        np.testing.assert_array_equal(source.read(spec.name), decode(encode(array, dtype, spec.name), dtype))
    # Once rounded, a second round changes no byte of any file.
    again = ((spec, source.read(spec.name)) for spec in parameter_table(config))
    save_hf(tmp_path / "b", config, again, dtype, max_shard_bytes=max_shard_bytes)
    assert sorted(os.listdir(tmp_path / "a")) == sorted(os.listdir(tmp_path / "b"))
    for file in (tmp_path / "a").iterdir():
        assert file.read_bytes() == (tmp_path / "b" / file.name).read_bytes()


def test_shards_stay_below_the_limit(tmp_path, config, tensors):
    limit = 3000
    save_hf(tmp_path / "m", config, tensors, max_shard_bytes=limit)
    index = json.loads((tmp_path / "m" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == {spec.hf_name for spec, _ in tensors}
    assert index["metadata"]["total_size"] == sum(array.nbytes for _, array in tensors)
    shards = sorted((tmp_path / "m").glob("*.safetensors"))
    assert {shard.name for shard in shards} == set(index["weight_map"].values())
    assert shards[0].name == f"model-00001-of-{len(shards):05d}.safetensors"
    for shard in shards:
        arrays = load_file(shard)
        assert len(arrays) == 1 or sum(array.nbytes for array in arrays.values()) <= limit


@pytest.mark.parametrize("model", ["qwen2_tiny", "qwen3_tiny", "llama3_tiny"])
def test_golden_checkpoint_written_again(shared, tmp_path, model):
    folder = shared / "golden" / model
    config = read_hf_config(folder)
    source = open_weights(folder, config)
    save_hf(tmp_path / model, config, ((spec, source.read(spec.name)) for spec in parameter_table(config)))
    assert read_hf_config(tmp_path / model) == config
    expected = load_file(folder / "model.safetensors")
    written = load_file(tmp_path / model / "model.safetensors")
    assert set(written) == set(expected)
    for name, array in expected.items():
        np.testing.assert_array_equal(written[name], array)


def test_one_tensor_is_taken_at_a_time(tmp_path, config, tensors):
    """Streaming: when the next tensor is asked for, the bytes of the one before are already with the file."""
    written = []

    def stream():
        for spec, array in tensors:
            written.append(sum(file.stat().st_size for file in tmp_path.glob(".m.*.tmp/*.safetensors")))
            yield spec, array

    save_hf(tmp_path / "m", config, stream(), max_shard_bytes=4000)
    assert written == sorted(written)
    assert len(set(written)) > 3


@pytest.mark.parametrize("change", ["short", "long", "swapped", "shape"])
def test_tensors_must_be_the_table(tmp_path, config, tensors, change):
    given = {
        "short": tensors[:-1],
        "long": [*tensors, tensors[-1]],
        "swapped": [tensors[1], tensors[0], *tensors[2:]],
        "shape": [(tensors[0][0], tensors[0][1].T), *tensors[1:]],
    }[change]
    with pytest.raises(ValueError, match=r"zip\(\)|was given where|should have shape"):
        save_hf(tmp_path / "m", config, given)
    assert os.listdir(tmp_path) == []


def test_failure_half_way_leaves_the_earlier_model(tmp_path, config, tensors):
    save_hf(tmp_path / "m", config, tensors)
    earlier = {file.name: file.read_bytes() for file in (tmp_path / "m").iterdir()}

    def stop_half_way():
        yield from tensors[:7]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        save_hf(tmp_path / "m", config, stop_half_way(), max_shard_bytes=1000, replace=True)
    beyond = [(spec, array * 1e9) for spec, array in tensors]
    with pytest.raises(UserError, match=r"model\.embed_tokens\.weight: the value"):
        save_hf(tmp_path / "m", config, beyond, "float16", replace=True)
    assert os.listdir(tmp_path) == ["m"]
    assert {file.name: file.read_bytes() for file in (tmp_path / "m").iterdir()} == earlier


def test_only_a_model_folder_is_replaced_and_only_when_asked(tmp_path, config, tensors):
    save_hf(tmp_path / "m", config, tensors, max_shard_bytes=3000)
    with pytest.raises(UserError, match="not empty"):
        save_hf(tmp_path / "m", config, tensors)
    save_hf(tmp_path / "m", config, tensors, replace=True)
    assert sorted(os.listdir(tmp_path / "m")) == ["config.json", "generation_config.json", "model.safetensors"]
    (tmp_path / "m" / "notes").mkdir()
    (tmp_path / "papers").mkdir()
    (tmp_path / "papers" / "thesis.txt").write_text("years of work")
    for name, foreign in (("m", "notes"), ("papers", r"thesis\.txt")):
        with pytest.raises(UserError, match=rf"{foreign}: is no part of a model"):
            save_hf(tmp_path / name, config, tensors, replace=True)
    assert (tmp_path / "papers" / "thesis.txt").exists()


def test_tokenizer_is_written_with_the_model(tmp_path, config, tensors):
    class Tokenizer:
        def save(self, directory):
            (directory / "tokenizer.json").write_text("{}")

    save_hf(tmp_path / "m", config, tensors, tokenizer=Tokenizer())
    assert (tmp_path / "m" / "tokenizer.json").read_text() == "{}"


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_transformers_loads_the_folder(tmp_path, config, qwen3, family, dtype):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = qwen3 if family == "qwen3" else config
    rng = np.random.default_rng(0)
    tensors = [(spec, rng.normal(size=spec.shape).astype(np.float32)) for spec in parameter_table(config)]
    save_hf(tmp_path / "m", config, tensors, dtype, max_shard_bytes=3000)
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "m", torch_dtype=getattr(torch, dtype), output_loading_info=True
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert model.generation_config.eos_token_id == [1, 2]
    state = model.state_dict()
    for spec, array in tensors:
        assert torch.equal(state[spec.hf_name], torch.from_numpy(array).to(getattr(torch, dtype)))
