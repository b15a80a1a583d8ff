"""Parameters that are several tensors in a Hugging Face checkpoint: read, written, identified, adapted."""

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from small_model import random_arrays
from stacked import COUNT, STACK, stacked_config

from mindrlhf.checkpoint.adapted import split_adapter
from mindrlhf.checkpoint.hf import save_hf
from mindrlhf.checkpoint.peft import read_adapter, write_adapter
from mindrlhf.checkpoint.peft_config import Base
from mindrlhf.checkpoint.weight_source import fingerprint, open_weights
from mindrlhf.checkpoint.weights import Weights
from mindrlhf.configs.lora import Adapter
from mindrlhf.errors import UserError
from mindrlhf.models.parameters import parameter_table

NAMES = [f"model.layers.1.mlp.stack.{i}.up.weight" for i in range(COUNT)]


@pytest.fixture
def config(monkeypatch):
    return stacked_config(monkeypatch)


@pytest.fixture
def arrays(config):
    return random_arrays(config)


@pytest.fixture
def folder(tmp_path, config, arrays):
    tensors = [(spec, arrays[spec.name]) for spec in parameter_table(config)]
    save_hf(tmp_path / "hf", config, tensors, max_shard_bytes=20000)
    return tmp_path / "hf"


def test_written_apart_and_read_together(folder, config, arrays):
    stored = {name: array for file in folder.glob("*.safetensors") for name, array in load_file(file).items()}
    for i, name in enumerate(NAMES):
        np.testing.assert_array_equal(stored[name], arrays[STACK][i])
    source = open_weights(folder, config)
    for spec in parameter_table(config):
        np.testing.assert_array_equal(source.read(spec.name), arrays[spec.name])


@pytest.mark.parametrize(
    "index",
    [
        (slice(1, 3), slice(10, 20), slice(0, 32)),
        (slice(2, 3), slice(0, 48, 5), slice(4, 8)),
        (slice(0, 4, 2), slice(0, 48), slice(0, 32)),
    ],
)
def test_parts(folder, config, arrays, index):
    part = open_weights(folder, config).read(STACK, index)
    assert part.flags.c_contiguous
    np.testing.assert_array_equal(part, arrays[STACK][index])


def test_our_names_hold_the_whole_and_have_the_same_fingerprint(tmp_path, folder, config, arrays):
    save_file(arrays, tmp_path / "ours.safetensors")
    ours, theirs = open_weights(tmp_path / "ours.safetensors", config), open_weights(folder, config)
    np.testing.assert_array_equal(ours.read(STACK), arrays[STACK])
    table = parameter_table(config)
    assert fingerprint(table, ours.read) == fingerprint(table, theirs.read)
    arrays[STACK][3] += 1
    changed = fingerprint(table, lambda name, index: arrays[name][index])
    assert changed != fingerprint(table, theirs.read)


def test_a_missing_tensor_is_named(tmp_path, config, folder):
    stored = {name: array for file in folder.glob("*.safetensors") for name, array in load_file(file).items()}
    del stored[NAMES[2]]
    save_file(stored, tmp_path / "lacking.safetensors")
    with pytest.raises(UserError, match=rf"the weight {NAMES[2]} is missing".replace(".", r"\.")):
        open_weights(tmp_path / "lacking.safetensors", config)


def test_adapters(tmp_path, folder, config, arrays):
    adapter = Adapter(2, 4, target_modules=("up", "down_proj"))
    adapted = config.model_copy(update={"adapter": adapter})
    rows = {spec.name: spec for spec in parameter_table(adapted)}
    values = random_arrays(adapted) | arrays
    a, b = (rows[STACK.replace("weight", kind)] for kind in ("lora_a", "lora_b"))
    assert (a.shape, b.shape) == ((COUNT, 2, 32), (COUNT, 48, 2))
    assert ([cut.dim for cut in a.cuts], [cut.dim for cut in b.cuts]) == ([0], [0, 1])
    matrices: dict[str, np.ndarray] = {}
    merged = dict(split_adapter(((spec, values[spec.name]) for spec in rows.values()), matrices))
    expected = values[STACK] + np.float32(2) * np.einsum("eor,eri->eoi", values[b.name], values[a.name])
    np.testing.assert_allclose(
        next(array for spec, array in merged.items() if spec.name == STACK), expected, rtol=1e-5, atol=1e-6
    )

    write_adapter(tmp_path / "adapter", adapter, matrices, Base(str(folder), None))
    stored = read_adapter(tmp_path / "adapter")
    assert set(stored.arrays) >= {name.replace("weight", "lora_A.weight") for name in NAMES}
    read = Weights(str(folder), adapted, 0, str(tmp_path / "adapter")).reader()
    np.testing.assert_array_equal(read(b), values[b.name])
    part = (slice(1, 3), slice(8, 40), slice(0, 16))
    found = stored.merged(rows[STACK], arrays[STACK][part].copy(), part)
    np.testing.assert_allclose(found, expected[part], rtol=1e-5, atol=1e-6)


def test_one_stack_has_one_rank(config):
    adapter = Adapter(2, 4, rank_pattern={"stack.1.up": 3})
    with pytest.raises(UserError, match="several ranks"):
        parameter_table(config.model_copy(update={"adapter": adapter}))
