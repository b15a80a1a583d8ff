"""Finding, checking and reading the weights of a model."""

import json
import logging
import struct

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from mindrlhf.checkpoint.ckpt_file import write_ckpt
from mindrlhf.checkpoint.hf import read_hf_config
from mindrlhf.checkpoint.weight_source import index_weights, open_weights
from mindrlhf.configs.model import ModelConfig
from mindrlhf.errors import UserError
from mindrlhf.models.parameters import parameter_table


@pytest.fixture(scope="module")
def config():
    return ModelConfig(
        vocab_size=32, hidden_size=12, intermediate_size=20, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=4
    )


@pytest.fixture(scope="module")
def tied(config):
    return config.model_copy(update={"tie_word_embeddings": True})


@pytest.fixture
def arrays(config):
    """Our name -> random float32 array, for every parameter."""
    rng = np.random.default_rng(0)
    return {spec.name: rng.normal(size=spec.shape).astype(np.float32) for spec in parameter_table(config)}


@pytest.fixture
def hf_arrays(config, arrays):
    """The same by Hugging Face's names."""
    return {spec.hf_name: arrays[spec.name] for spec in parameter_table(config)}


def assert_reads(path, config, arrays):
    source = open_weights(path, config)
    for spec in parameter_table(config):
        value = source.read(spec.name)
        assert value.dtype == np.float32
        np.testing.assert_array_equal(value, arrays[spec.name])


def save_sharded(folder, tensors, index=None):
    """Two shards and an index, as Hugging Face lays them out."""
    names = sorted(tensors)
    files = {name: f"model-0000{1 + (i % 2)}-of-00002.safetensors" for i, name in enumerate(names)}
    for file in set(files.values()):
        save_file({name: tensors[name] for name in names if files[name] == file}, folder / file)
    content = {"metadata": {}, "weight_map": files} if index is None else index
    (folder / "model.safetensors.index.json").write_text(json.dumps(content))
    return files


@pytest.mark.parametrize("model", ["qwen2_tiny", "qwen3_tiny", "llama3_tiny"])
def test_golden_checkpoints(shared, model, caplog):
    folder = shared / "golden" / model
    config = read_hf_config(folder)
    source = open_weights(folder, config)
    assert not caplog.records
    expected = load_file(folder / "model.safetensors")
    assert source.dtype == "float32"
    for spec in parameter_table(config):
        np.testing.assert_array_equal(source.read(spec.name), expected[spec.hf_name])


def test_every_kind_of_path(tmp_path, config, arrays, hf_arrays, caplog):
    for name in ("single", "sharded", "unified", "ckpt", "per_rank/rank_0"):
        (tmp_path / name).mkdir(parents=True)
    save_file(hf_arrays, tmp_path / "single" / "model.safetensors")
    save_file(arrays, tmp_path / "mindformers_names.safetensors")
    save_sharded(tmp_path / "sharded", hf_arrays)
    names = list(arrays)
    save_file({name: arrays[name] for name in names[:5]}, tmp_path / "unified" / "part0.safetensors")
    save_file({name: arrays[name] for name in names[5:]}, tmp_path / "unified" / "part1.safetensors")
    (tmp_path / "unified" / ".part2.tmp.safetensors").write_bytes(b"unfinished")
    write_ckpt(tmp_path / "ckpt" / "a.ckpt", arrays.items(), "float32")
    write_ckpt(tmp_path / "per_rank" / "rank_0" / "a.ckpt", arrays.items(), "float32")
    for name in ("single", "single/model.safetensors", "mindformers_names.safetensors", "sharded", "unified", "ckpt",
                 "ckpt/a.ckpt", "per_rank"):  # fmt: skip
        assert_reads(tmp_path / name, config, arrays)
        assert not caplog.records


def test_a_file_that_mindspore_wrote(tmp_path, config, arrays, caplog):
    ms = pytest.importorskip("mindspore")
    parameters = [{"name": name, "data": ms.Tensor(array)} for name, array in arrays.items()]
    for kind in ("ckpt", "safetensors"):
        path = tmp_path / f"m.{kind}"
        ms.save_checkpoint(parameters, str(path), append_dict={"step_num": 7}, format=kind)
        assert_reads(path, config, arrays)
        assert caplog.messages[-1].endswith("1 tensors are not part of the model and are not used: step_num")


def test_slices(tmp_path, config, arrays, hf_arrays):
    save_file(hf_arrays, tmp_path / "model.safetensors")
    source = open_weights(tmp_path, config)
    for spec in parameter_table(config):
        for cut in spec.cuts:
            index = [slice(None)] * len(spec.shape)
            index[cut.dim] = slice(spec.shape[cut.dim] // 2, None)
            part = source.read(spec.name, tuple(index))
            np.testing.assert_array_equal(part, np.split(arrays[spec.name], 2, axis=cut.dim)[1])


def test_stored_types(tmp_path, config, hf_arrays):
    halves = {name: array.astype(np.float16) for name, array in hf_arrays.items()}
    save_file(halves, tmp_path / "model.safetensors")
    source = open_weights(tmp_path, config)
    assert source.dtype == "float16"
    for spec in parameter_table(config):
        np.testing.assert_array_equal(source.read(spec.name), halves[spec.hf_name].astype(np.float32))
    save_file(halves | {"lm_head.weight": hf_arrays["lm_head.weight"]}, tmp_path / "model.safetensors")
    assert open_weights(tmp_path, config).dtype == "float32"
    save_file(halves | {"lm_head.weight": np.zeros((32, 12), np.int8)}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=r"model\.safetensors: tensor lm_head\.weight is stored as I8"):
        open_weights(tmp_path, config)


def test_nothing_is_loaded_when_opened(tmp_path, config, hf_arrays, monkeypatch):
    """The whole check works on headers: it passes on a file whose data is a hole, and maps nothing."""
    save_file(hf_arrays, tmp_path / "model.safetensors")
    monkeypatch.setattr(np, "memmap", None)
    open_weights(tmp_path, config)


def test_missing_weights_are_named(tmp_path, config, arrays, hf_arrays):
    path = tmp_path / "model.safetensors"
    del hf_arrays["model.layers.1.mlp.up_proj.weight"]
    save_file(hf_arrays, path)
    with pytest.raises(UserError, match=rf"{path}: the weight model\.layers\.1\.mlp\.up_proj\.weight is missing"):
        open_weights(path, config)
    del hf_arrays["model.norm.weight"]
    save_file(hf_arrays, path)
    with pytest.raises(UserError, match=r"up_proj\.weight and 1 more are missing"):
        open_weights(path, config)
    save_file({"v_head.weight": np.zeros(3)}, path)
    with pytest.raises(UserError, match=r"holds no weight of the model .*begins with v_head\.weight"):
        open_weights(path, config)
    save_file({}, path)
    with pytest.raises(UserError, match="holds no weight of the model"):
        open_weights(path, config)
    fused = {name: array for name, array in arrays.items() if ".wq." not in name}
    save_file(fused | {"model.layers.0.attention.w_qkv.weight": np.zeros(3)}, path)
    with pytest.raises(UserError, match=r"layers\.0\.attention\.wq\.weight .*qkv_concat"):
        open_weights(path, config)


def test_wrong_shape_is_named(tmp_path, config, hf_arrays):
    hf_arrays["model.layers.0.self_attn.k_proj.weight"] = np.zeros((12, 8), np.float32)
    save_file(hf_arrays, tmp_path / "model.safetensors")
    message = r"model\.safetensors: tensor model\.layers\.0\.self_attn\.k_proj\.weight has shape \[12, 8\].*\[8, 12\]"
    with pytest.raises(UserError, match=message):
        open_weights(tmp_path, config)


@pytest.mark.parametrize(
    "extra",
    ["model.layers.2.mlp.up_proj.weight", "model.layers.0.self_attn.o_proj.bias", "model.layers.1.k_norm.weight"],
)
def test_weights_of_a_larger_model_are_refused(tmp_path, config, hf_arrays, extra):
    save_file(hf_arrays | {extra: np.zeros(3, np.float32)}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=rf"holds {extra}.*qwen2, 2 layers"):
        open_weights(tmp_path, config)


def test_other_tensors_are_listed_once(tmp_path, config, arrays, hf_arrays, caplog):
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.zeros(2), "v_head.weight": np.zeros((1, 12))}
    save_file(hf_arrays | extra, tmp_path / "model.safetensors")
    with caplog.at_level(logging.WARNING, logger="mindrlhf"):
        assert_reads(tmp_path, config, arrays)
    assert len(caplog.records) == 1
    assert "2 tensors are not part of the model" in caplog.text
    assert "inv_freq, v_head.weight" in caplog.text


def test_head_of_a_tied_model(tmp_path, config, tied, arrays, hf_arrays, monkeypatch, caplog):
    monkeypatch.setattr("mindrlhf.checkpoint.weight_source._BLOCK_ELEMENTS", 60)  # several blocks of 5 rows
    path = tmp_path / "model.safetensors"
    save_file(hf_arrays | {"lm_head.weight": hf_arrays["model.embed_tokens.weight"]}, path)
    assert_reads(tmp_path, tied, arrays)
    assert caplog.messages[-1].endswith("are not used: lm_head.weight")
    different = hf_arrays["model.embed_tokens.weight"].copy()
    different[-1, -1] += 1
    for head in (different, different[:-1]):
        save_file(hf_arrays | {"lm_head.weight": head}, path)
        with pytest.raises(UserError, match=r"lm_head\.weight differs from the embedding.*tie_word_embeddings: true"):
            open_weights(tmp_path, tied)
    del hf_arrays["lm_head.weight"]
    save_file(hf_arrays, path)
    assert_reads(tmp_path, tied, arrays)
    with pytest.raises(UserError, match=r"lm_head\.weight is missing; set tie_word_embeddings to true"):
        open_weights(tmp_path, config)


def test_damaged_file_is_named(tmp_path, config, hf_arrays):
    path = tmp_path / "model.safetensors"
    save_file(hf_arrays, path)
    content = path.read_bytes()
    for kept in (0, 5, 100, len(content) - 1):
        path.write_bytes(content[:kept])
        with pytest.raises(UserError, match=r"model\.safetensors: "):
            open_weights(tmp_path, config)
    path.write_bytes(struct.pack("<Q", len(content)) + content[8:])
    with pytest.raises(UserError, match=r"model\.safetensors: not a safetensors file, or truncated"):
        open_weights(tmp_path, config)


def test_file_that_shrinks_after_opening_is_a_user_error(tmp_path, config, hf_arrays):
    path = tmp_path / "model.safetensors"
    save_file(hf_arrays, path)
    source = open_weights(tmp_path, config)
    path.write_bytes(path.read_bytes()[:2000])
    with pytest.raises(UserError, match=r"model\.safetensors: tensor .* cannot be read"):
        list(map(source.read, source.shapes))


def test_sharded_checkpoint_with_faults(tmp_path, config, hf_arrays):
    files = save_sharded(tmp_path, hf_arrays)
    index = tmp_path / "model.safetensors.index.json"
    second = tmp_path / "model-00002-of-00002.safetensors"
    name = next(name for name, file in files.items() if file == second.name)
    kept = second.rename(tmp_path / "kept")
    with pytest.raises(UserError, match=r"index\.json: names model-00002-of-00002\.safetensors, and that file is not"):
        open_weights(tmp_path, config)
    kept.rename(second)
    save_sharded(tmp_path, hf_arrays, {"weight_map": files | {name: "model-00001-of-00002.safetensors"}})
    with pytest.raises(UserError, match=rf"says that {name} is in model-00001"):
        open_weights(tmp_path, config)
    for content in ('{"weight_map": 3}', "{}", '{"weight_map": {"a": 1}}'):
        index.write_text(content)
        with pytest.raises(UserError, match=r"index\.json: has no weight_map"):
            open_weights(tmp_path, config)
    for content, message in (("{", "not valid JSON"), ("[]", "a JSON object is needed")):
        index.write_text(content)
        with pytest.raises(UserError, match=rf"index\.json: .*{message}"):
            open_weights(tmp_path, config)


@pytest.mark.parametrize("shard", ["../outside.safetensors", "{folder}/outside.safetensors", "x/../../outside"])
def test_an_index_that_names_files_elsewhere(tmp_path, hf_arrays, shard):
    """Not even where there is such a file."""
    save_file(dict(hf_arrays), tmp_path / "outside.safetensors")
    folder = tmp_path / "model"
    folder.mkdir()
    name = shard.format(folder=tmp_path)
    weight_map = dict.fromkeys(hf_arrays, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(UserError, match=r"index\.json: names '.*outside.*', which is not a file inside of its folder"):
        index_weights(folder)


def test_paths_that_hold_no_model(tmp_path, config, arrays):
    with pytest.raises(UserError, match="does not exist"):
        open_weights(tmp_path / "none", config)
    with pytest.raises(UserError, match=r"holds no \.safetensors and no \.ckpt file;"):
        open_weights(tmp_path, config)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(UserError, match=r"PyTorch \.bin"):
        open_weights(tmp_path, config)
    with pytest.raises(UserError, match=r"pytorch_model\.bin: not a weight file"):
        open_weights(tmp_path / "pytorch_model.bin", config)
    for rank in (0, 1):
        (tmp_path / "ranks" / f"rank_{rank}").mkdir(parents=True)
    with pytest.raises(UserError, match=r"shards of 2 ranks.*transform_checkpoint"):
        open_weights(tmp_path / "ranks", config)
    for name in ("a", "b"):
        save_file(arrays, tmp_path / f"{name}.safetensors")
        write_ckpt(tmp_path / "ranks" / f"{name}.ckpt", arrays.items(), "float32")
    with pytest.raises(UserError, match=r"is in both a\.safetensors and b\.safetensors"):
        open_weights(tmp_path, config)
    with pytest.raises(UserError, match=r"holds 2 \.ckpt files"):
        open_weights(tmp_path / "ranks", config)
