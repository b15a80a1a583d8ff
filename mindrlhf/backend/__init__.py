"""Differences between device targets: operators, collectives, memory, process start.

All other packages run the same code on a laptop's CPU and on Ascend, and read a device's facts from its record.
"""

from mindrlhf.backend.devices import DEVICES, default_device, find_device  # noqa: F401
from mindrlhf.backend.parameter_memory import dtype_of, read, read_all, rewriting, write  # noqa: F401
