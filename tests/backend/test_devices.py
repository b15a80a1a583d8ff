"""Records of devices: their names stand in `backend` and in settings only, and their limits are checked."""

import ast
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest

import mindrlhf
from mindrlhf.backend import devices
from mindrlhf.backend.ascend import ASCEND
from mindrlhf.backend.cpu import CPU
from mindrlhf.backend.device import AttentionLimits
from mindrlhf.backend.memory import STORES, open_store
from mindrlhf.configs.base import DeviceTarget
from mindrlhf.configs.model import ModelConfig
from mindrlhf.configs.model_yaml import DEVICE_KEYS, ModelYaml
from mindrlhf.configs.validate import check_device
from mindrlhf.errors import UserError

PACKAGE = Path(mindrlhf.__file__).parent
SETTINGS = {"configs/base.py", "configs/model_yaml.py"}  # the word's type, and its default
RAYS = {"launchers/ray_ranks.py"}  # Ray's name of a processor

pytestmark = pytest.mark.fast


def test_names_of_devices_stand_in_backend_and_settings_only():
    found = {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and node.value in devices.DEVICES
    }
    assert {path for path in found if not path.startswith("backend/")} == SETTINGS | RAYS


def test_the_settings_word_names_every_device():
    assert get_args(DeviceTarget) == tuple(devices.DEVICES)
    with pytest.raises(UserError, match=r"context.device_target is 'GPU', but it must be CPU or Ascend"):
        devices.find_device("GPU")


@pytest.mark.parametrize("device", devices.DEVICES.values(), ids=devices.DEVICES.keys())
def test_a_record_is_complete(device, tmp_path):
    assert type(open_store(device, [], tmp_path)) is STORES[device.swap]
    assert set(device.context_keys) <= set(DEVICE_KEYS)
    assert device.activations("bfloat16") in device.product_dtypes
    assert device.in_host_memory or device.default_chip in device.chips
    for keys in device.default_dtypes.values():
        assert set(keys.values()) <= set(device.product_dtypes)


def test_an_accelerator_is_the_default_where_it_is_attached(monkeypatch):
    for attached, name in ((False, CPU.name), (True, ASCEND.name)):
        monkeypatch.setattr(type(ASCEND), "is_attached", lambda device, attached=attached: attached)
        assert devices.default_device() == name


@pytest.mark.parametrize(
    ("limits", "refused"), [((16, None), False), ((64, 64), False), ((48, None), True), ((16, 32), True)]
)
def test_heads_that_the_attention_cannot_compute_are_refused(monkeypatch, limits, refused):
    monkeypatch.setitem(devices.DEVICES, CPU.name, replace(CPU, attention=AttentionLimits(*limits)))
    yaml = ModelYaml(path="train.yaml", context={"device_target": CPU.name}, model={"compute_dtype": "float32"})
    model = ModelConfig(
        family="qwen2",
        vocab_size=320,
        hidden_size=128,
        num_layers=2,
        num_heads=2,
        num_kv_heads=1,
        intermediate_size=128,
        max_position_embeddings=128,
    )
    if refused:
        with pytest.raises(UserError, match=r"train.yaml: .*head_dim is 64, and attention on CPU takes multiples of"):
            check_device(yaml, model)
    else:
        check_device(yaml, model)
