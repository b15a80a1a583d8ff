"""All devices by name."""

from mindrlhf.backend.ascend import ASCEND
from mindrlhf.backend.cpu import CPU
from mindrlhf.backend.device import Device
from mindrlhf.errors import UserError

DEVICES = {device.name: device for device in (CPU, ASCEND)}


def find_device(name: str) -> Device:
    """Return the device of a `context.device_target`. Raises UserError for an unknown one."""
    if name not in DEVICES:
        raise UserError(f"context.device_target is {name!r}, but it must be {' or '.join(DEVICES)}")
    return DEVICES[name]


def device_in_use() -> Device:
    """Return the device that MindSpore computes on in this process."""
    import mindspore

    return DEVICES[mindspore.get_context("device_target")]


def default_device() -> str:
    """Return the name of the accelerator that this host has, else `CPU`."""
    return [device.name for device in DEVICES.values() if device.is_attached()][-1]
