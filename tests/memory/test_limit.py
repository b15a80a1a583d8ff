"""Memory limits: chips by name, MindSpore's GB, and control groups of both versions."""

import pytest

from mindrlhf.configs.model_yaml import ModelYaml
from mindrlhf.errors import UserError
from mindrlhf.memory import limit
from mindrlhf.memory.limit import CHIPS, find_chip, free_memory, memory_limit
from mindrlhf.units import GIB


def on_ascend(**context) -> ModelYaml:
    return ModelYaml(path="model.yaml", context={"device_target": "Ascend", **context})


def test_a_chip_has_what_the_system_leaves():
    for name, chip in CHIPS.items():
        assert 0.8 * chip.gib * GIB < memory_limit(on_ascend(), 1, name)[0] < chip.gib * GIB
    assert find_chip("Ascend910B3") is find_chip("910b3")
    assert find_chip("Ascend910_9382") is CHIPS["910_93"]
    with pytest.raises(UserError, match="Unknown chip '910B7': did you mean '910B"):
        find_chip("910B7")


def test_chips_of_a_series_differ_by_cores_and_clock():
    """The rates that others publish: 354 TFLOP/s of a 910B2 (verl, AReaL)."""
    assert CHIPS["910B2"].flops == pytest.approx(354e12, rel=1e-3)
    assert CHIPS["910B3"].flops / CHIPS["910B2"].flops == pytest.approx(20 / 24)
    for chip in CHIPS.values():
        assert 50e12 < chip.flops < 400e12
        assert 0.2e12 < chip.memory_rate < 2e12
        assert 25e9 < chip.link_rate < 400e9


def test_the_smaller_of_setting_and_chip_holds():
    usable, words = memory_limit(on_ascend(), 8)
    assert usable == pytest.approx(60.7 * GIB, rel=1e-3)
    assert words == "60.7 GiB are usable of a 910B3 (`mindrlhf plan --chip` names another)"
    assert memory_limit(on_ascend(max_device_memory="55GB"), 8) == (
        55 * GIB,
        "context.max_device_memory 55GB is 55.0 GiB",
    )
    usable, words = memory_limit(on_ascend(max_device_memory="55GB"), 8, outside=GIB)
    assert usable == 56 * GIB
    assert words == "context.max_device_memory 55GB is 55.0 GiB, and 1.0 GiB of hccl come on top"
    usable, words = memory_limit(on_ascend(max_device_memory="60GB"), 8, outside=GIB)
    assert usable == pytest.approx(60.7 * GIB, rel=1e-3), "the chip has no more"
    usable, words = memory_limit(on_ascend(max_device_memory="55GB"), 8, "910B4")
    assert usable == pytest.approx(28.7 * GIB, rel=1e-3)
    assert words == "28.7 GiB are usable of a 910B4; context.max_device_memory 55GB is 55.0 GiB"


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A machine with 100 bytes free, and the folders of its control groups."""
    memory = limit.psutil.virtual_memory()._replace(available=100)
    monkeypatch.setattr(limit.psutil, "virtual_memory", lambda: memory)
    monkeypatch.setattr(limit, "CGROUPS", tmp_path)
    monkeypatch.setattr(limit, "OWN_GROUP", tmp_path / "own")
    return tmp_path


def group(folder, names: tuple[str, str], most: object, used: int, stat: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in zip(names, (most, used), strict=True):
        (folder / name).write_text(f"{value}\n")
    (folder / "memory.stat").write_text(stat)


SECOND, FIRST = ("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")


def test_a_machine_without_limits(machine):
    assert free_memory() == (100, "on this machine")
    group(machine, SECOND, "max", 90, "inactive_file 5\n")
    assert free_memory() == (100, "on this machine")
    assert memory_limit(ModelYaml(path="m", context={"device_target": "CPU"}), 4)[0] == 25


def test_a_container_of_version_2(machine):
    group(machine, SECOND, 60, 30, "anon 9\ninactive_file 5\n")
    assert free_memory() == (35, "in this container")
    (machine / "own").write_text("0::/a/b\n")
    group(machine / "a", SECOND, 50, 49, "inactive_file 3\n")
    group(machine / "a" / "b", SECOND, "max", 9, "")
    assert free_memory() == (4, "in this container"), "a group above has the tightest limit"


def test_a_container_of_version_1(machine):
    (machine / "own").write_text("5:cpu:/x\n4:memory:/job\n")
    group(machine / "memory", FIRST, 2**63 - 1, 10, "")
    group(machine / "memory" / "job", FIRST, 80, 70, "inactive_file 1\ntotal_inactive_file 2\n")
    assert free_memory() == (12, "in this container")
    group(machine / "memory" / "job", FIRST, 80, 90, "")
    assert free_memory() == (0, "in this container")
