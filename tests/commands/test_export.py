"""`mindrlhf export`: from the shards of a training checkpoint to the Hugging Face folder they came from."""

import json

import jobs
import numpy as np
import pytest
from safetensors.numpy import load_file
from training_states import save, stores

from mindrlhf.checkpoint.hf import companion_files, read_hf_config
from mindrlhf.checkpoint.stored_tensor import decode, encode
from mindrlhf.checkpoint.training_state import ShardGroup, TrainingState
from mindrlhf.checkpoint.weight_source import index_weights
from mindrlhf.data.tokenizer import Tokenizer
from mindrlhf.models.parameters import parameter_table
from mindrlhf.parallel.layout import model_layout
from mindrlhf.parallel.mesh import Mesh


@pytest.fixture(scope="module")
def trained(task, shared, tmp_path_factory):
    """The golden model's weights as a checkpoint of 2 x 2 ranks, and the folder that they came from."""
    golden = shared / "golden" / "qwen2_tiny"
    config = read_hf_config(golden)
    stored = load_file(golden / "model.safetensors")
    layout = model_layout(config, Mesh(pp=2, tp=2), offset=0 if config.num_layers % 2 == 0 else (1, 0))
    arrays = {spec.name: stored[spec.hf_name] for spec in parameter_table(config)}
    files = {f"hf/{name}": text for name, text in companion_files(config, Tokenizer.from_path(task.folder)).items()}
    folder = tmp_path_factory.mktemp("trained")
    states = [
        TrainingState(
            3, {"model": ShardGroup(layout, {n: arrays[n][part] for n, part in layout.shards(rank)})}, {}, {}, files
        )
        for rank in range(layout.size)
    ]
    save(stores(folder, layout.size), states)
    return folder, golden


def export(folder, output, *more) -> list:
    return ["export", "--checkpoint", folder, "--output", output, *more]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_every_tensor_comes_back(trained, tmp_path, capsys, dtype):
    folder, golden = trained
    assert jobs.call(export(folder / "latest", tmp_path / "hf", "--dtype", dtype)) == 0
    assert "the policy after step 3" in capsys.readouterr().out
    found, expected = index_weights(tmp_path / "hf"), load_file(golden / "model.safetensors")
    kind = {"fp32": "float32", "bf16": "bfloat16"}[dtype]
    names = {spec.hf_name for spec in parameter_table(read_hf_config(golden))}
    assert found.keys() == names
    for name in names:
        assert found[name].dtype == kind
        rounded = decode(encode(expected[name], kind, name), kind)
        assert found[name].read().tobytes() == rounded.tobytes(), name
    ours, theirs = (json.loads((at / "config.json").read_text()) for at in (tmp_path / "hf", golden))
    same = ("model_type", "architectures", "hidden_size", "num_attention_heads", "vocab_size", "tie_word_embeddings")
    assert {key: ours.get(key) for key in same} == {key: theirs.get(key) for key in same}
    assert ours["torch_dtype"] == kind
    assert (tmp_path / "hf" / "tokenizer.json").is_file()


def test_transformers_gives_the_golden_tokens(trained, tmp_path):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    folder, golden = trained
    assert jobs.call(export(folder, tmp_path / "hf")) == 0
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", torch_dtype=torch.float32)
    data = np.load(golden / "golden.npz")
    for ids, mask, greedy in zip(data["input_ids"], data["attention_mask"], data["greedy"], strict=True):
        prompt = torch.from_numpy(ids[mask == 1][None].astype(np.int64))
        out = model.generate(prompt, max_new_tokens=len(greedy), min_new_tokens=len(greedy), do_sample=False)
        assert out[0, prompt.shape[1] :].tolist() == greedy.tolist()


def test_what_export_refuses(trained, output, refused, tmp_path):
    folder, _ = trained
    refused(export(tmp_path / "none", tmp_path / "out"), "none: holds no training checkpoint", "give a step_N folder")
    refused(export(output, tmp_path / "out"), f"{output}: holds no training checkpoint")
    refused(export(folder, output / "ckpt" / "hf"), "not empty")
    refused(export(folder, tmp_path / "out", "--role", "critic"), "holds model, and no critic")
    assert not (tmp_path / "out").exists()
