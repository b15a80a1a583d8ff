"""Parameter memory as on Ascend, on the CPU: `asnumpy` gives copies, and a write has to go back to the device.

As a script it runs another one so: `python copying_memory.py SCRIPT ARGUMENTS`.
"""

import contextlib
import runpy
import sys
from collections.abc import Iterator
from unittest import mock

import numpy as np


@contextlib.contextmanager
def copying() -> Iterator[None]:
    """Inside, a write into what `Parameter.asnumpy` gave is lost."""
    from mindspore import Parameter, Tensor

    from mindrlhf.backend import parameter_memory
    from mindrlhf.backend.ascend import ASCEND

    def asnumpy(parameter):
        return np.array(Tensor.asnumpy(parameter))

    with (
        mock.patch.object(Parameter, "asnumpy", asnumpy, create=True),
        mock.patch.object(parameter_memory, "device_in_use", return_value=ASCEND),
    ):
        yield


@contextlib.contextmanager
def copying_threads() -> Iterator[None]:
    """As `copying`, for ranks that are threads: MindSpore's own `copy_` aborts when two threads call it."""
    from mindspore import Parameter, Tensor

    def copy_(parameter, source):
        Tensor.asnumpy(parameter)[...] = Tensor.asnumpy(source)

    with copying(), mock.patch.object(Parameter, "copy_", copy_, create=True):
        yield


if __name__ == "__main__":
    del sys.argv[0]
    with copying():
        runpy.run_path(sys.argv[0], run_name="__main__")
