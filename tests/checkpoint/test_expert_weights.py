"""Weights of experts: a tensor for each expert, all experts in one tensor, our names, and parts of them."""

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from small_model import EXPERTS, random_arrays, small_config

from mindrlhf.checkpoint.hf import read_hf_config, save_hf
from mindrlhf.checkpoint.stored_tensor import StoredTensor
from mindrlhf.checkpoint.weight_source import fingerprint, open_weights
from mindrlhf.errors import UserError
from mindrlhf.models.parameter_spec import View
from mindrlhf.models.parameters import parameter_table

LAYER = "model.layers.1.mlp"
W1 = "model.layers.1.feed_forward.routed_experts.ffn.w1.weight"
STORED = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}


@pytest.fixture(scope="module")
def config():
    return small_config(**EXPERTS)


@pytest.fixture(scope="module")
def arrays(config):
    return random_arrays(config)


@pytest.fixture
def folder(tmp_path, config, arrays):
    save_hf(tmp_path / "hf", config, [(spec, arrays[spec.name]) for spec in parameter_table(config)])
    return tmp_path / "hf"


def joint(folder, path):
    """The same checkpoint as `transformers` computes with it: gate and up of all experts in one tensor."""
    stored = load_file(folder / "model.safetensors")
    maps = {name: [stored.pop(f"{LAYER}.experts.{i}.{name}.weight") for i in range(6)] for name in STORED.values()}
    both = [np.concatenate(pair) for pair in zip(maps["gate_proj"], maps["up_proj"], strict=True)]
    stored[f"{LAYER}.experts.gate_up_proj"] = np.stack(both)
    stored[f"{LAYER}.experts.down_proj"] = np.stack(maps["down_proj"])
    save_file(stored, path)
    return path


def test_each_expert_is_a_tensor(folder, config, arrays):
    stored = load_file(folder / "model.safetensors")
    for ours, theirs in STORED.items():
        whole = arrays[W1.replace("w1", ours)]
        for i in range(config.num_experts):
            np.testing.assert_array_equal(stored[f"{LAYER}.experts.{i}.{theirs}.weight"], whole[i])
    assert stored[f"{LAYER}.gate.weight"].shape == (6, 32)
    assert stored["model.layers.0.mlp.gate_proj.weight"].shape == (48, 32)
    assert read_hf_config(folder) == config


def test_joint_tensors_and_our_names_hold_the_same(tmp_path, folder, config, arrays):
    save_file(arrays, tmp_path / "ours.safetensors")
    table = parameter_table(config)
    prints = set()
    for path in (folder, joint(folder, tmp_path / "joint.safetensors"), tmp_path / "ours.safetensors"):
        source = open_weights(path, config)
        for spec in table:
            np.testing.assert_array_equal(source.read(spec.name), arrays[spec.name])
        part = (slice(1, 5), slice(8, 20), slice(0, 32))
        np.testing.assert_array_equal(source.read(W1, part), arrays[W1][part])
        prints.add(fingerprint(table, source.read))
    assert len(prints) == 1


def test_joint_tensors_of_another_shape_are_refused(tmp_path, folder, config):
    path = joint(folder, tmp_path / "joint.safetensors")
    wider = config.model_copy(update={"moe_intermediate_size": 32})
    with pytest.raises(UserError, match=r"has shape \[6, 48, 32\] in place of \[6, 64, 32\]"):
        open_weights(path, wider)


def test_a_view_of_a_tensor_in_segments(tmp_path):
    numbers = np.arange(24, dtype=np.float32)
    (tmp_path / "x").write_bytes(numbers[:10].tobytes() + bytes(4) + numbers[10:].tobytes())
    view = View((2, 3, 4), ((0, 2), (1, 3), (0, 4)), (0, 2, 1))
    tensor = StoredTensor(tmp_path / "x", "x", "float32", (2, 4, 2), ((0, 40), (44, 56)), view=view)
    expected = numbers.reshape(2, 3, 4)[:, 1:].swapaxes(1, 2)
    np.testing.assert_array_equal(tensor.read(), expected)
    part = (slice(1, 2), slice(0, 4, 2), slice(0, 2))
    np.testing.assert_array_equal(tensor.read(part), expected[part])
