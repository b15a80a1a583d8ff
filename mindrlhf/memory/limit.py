"""Memory that one process of a job may use.

It is that of a chip, or of this machine. Pure Python.
"""

from pathlib import Path

import psutil

from mindrlhf.algorithms.methods import unknown_name
from mindrlhf.backend.device import Chip
from mindrlhf.backend.devices import DEVICES
from mindrlhf.configs.model_yaml import ModelYaml
from mindrlhf.units import GIB, MIB

SYSTEM = 3400 * MIB  # in use on an idle chip by the system, as npu-smi shows it
CHIPS = {name: chip for device in DEVICES.values() for name, chip in device.chips.items()}
CGROUPS = Path("/sys/fs/cgroup")
OWN_GROUP = Path("/proc/self/cgroup")
# Controller's folder -> files of the limit and of the use, and the file cache's name in memory.stat.
VERSIONS = {
    "": ("memory.max", "memory.current", "inactive_file"),
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}


def memory_limit(yaml: ModelYaml, processes: int, chip: str | None = None, outside: int = 0) -> tuple[int, str]:
    """Find the bytes that one process may use, and their origin in words.

    processes: processes of the job; without memory of their own they share this machine. chip: one of CHIPS.
    outside: bytes of the plan that `context.max_device_memory` does not limit. Raises UserError for an unknown chip.
    """
    device = yaml.context.device
    if device.in_host_memory:
        free, where = free_memory()
        shared = f" for each of {processes} processes {where}" if processes > 1 else f" are free {where}"
        return free // processes, f"{free / processes / GIB:.1f} GiB{shared}"
    usable = int(find_chip(chip or device.default_chip).gib * GIB) - SYSTEM
    named = f"of a {chip}" if chip else f"of a {device.default_chip} (`mindrlhf plan --chip` names another)"
    words = f"{usable / GIB:.1f} GiB are usable {named}"
    asked = yaml.context.max_device_memory
    if asked is None:
        return usable, words
    most = int(float(asked.removesuffix("GB")) * GIB)  # MindSpore's GB is GiB
    shown = f"context.max_device_memory {asked} is {most / GIB:.1f} GiB"
    if outside:
        most += outside
        shown += f", and {outside / GIB:.1f} GiB of {device.collectives} come on top"
    return (most, shown) if most <= usable else (usable, f"{words}; {shown}")


def find_chip(chip: str) -> Chip:
    """Find a chip's figures by its name. Raises UserError for an unknown one."""
    name = chip.lower().removeprefix("ascend").strip(" -_")
    known = {each.lower(): figures for each, figures in CHIPS.items()}
    found = known.get("910_93" if name.startswith("910_93") else name)
    if found is None:
        raise unknown_name("chip", chip, CHIPS)
    return found


def free_memory() -> tuple[int, str]:
    """Read the free bytes, and whose they are.

    These are the machine's, or those of a control group that leaves fewer.
    """
    free = psutil.virtual_memory().available
    where = "on this machine"
    for controller, (limit, use, cache) in VERSIONS.items():
        for folder in _groups(controller):
            allowed, used = _number(folder / limit), _number(folder / use)
            if allowed is None or used is None:
                continue
            left = max(0, allowed - used + _cached(folder / "memory.stat", cache))
            if left < free:
                free = left
                where = "in this container"
    return free, where


def _groups(controller: str) -> list[Path]:
    """List the folders of this process's control group and of those above it."""
    root = CGROUPS / controller
    fields = [line.split(":", 2) for line in (OWN_GROUP.read_text() if OWN_GROUP.exists() else "").splitlines()]
    own = [root / path.lstrip("/") for _, names, path in fields if controller in names.split(",")]
    return [root, *(folder for path in own for folder in (path, *path.parents) if root in folder.parents)]


def _number(path: Path) -> int | None:
    """Read a number of a control group.

    None for an absent file, and without a limit.
    """
    text = path.read_text().strip() if path.is_file() else ""
    return int(text) if text.isdecimal() else None


def _cached(path: Path, name: str) -> int:
    """Read the bytes of file cache, which the system gives back on demand."""
    lines = path.read_text().splitlines() if path.is_file() else []
    return next((int(value) for key, value in map(str.split, lines) if key == name), 0)
