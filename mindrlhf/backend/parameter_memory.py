"""Reading and writing of parameters: the one way to their memory.

On the CPU both happen in the parameter's own buffer, without a copy. On Ascend the host sees copies only, so a write
goes back to the device; by MindSpore's documentation, not run on an NPU. Compiled graphs see written numbers on both.

NumPy is imported on use: its threads must not start before `run.stop_signals` has blocked the signals in them.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from mindspore import Parameter


def read(parameter: "Parameter") -> "np.ndarray":
    """Read the numbers of a parameter: its own memory on the CPU, read-only.

    Elsewhere they are a copy on the host.
    """
    numbers = parameter.asnumpy().view()
    numbers.flags.writeable = False
    return numbers


def read_all(parameters: Mapping[str, "Parameter"]) -> "dict[str, np.ndarray]":
    """Read the numbers of several parameters, by the same names; read-only."""
    return {name: read(parameter) for name, parameter in parameters.items()}


def write(parameter: "Parameter", values: "np.ndarray | float") -> None:
    """Set all numbers of a parameter.

    values: an array of its shape, or one number for all.
    Raises ValueError for an array of another shape.
    """
    import numpy as np

    if np.ndim(values) and np.shape(values) != parameter.shape:
        raise ValueError(f"{parameter.name} has shape {list(parameter.shape)}, not {list(np.shape(values))}")
    if _in_place():
        parameter.asnumpy()[...] = values
    else:
        array = np.empty_like(parameter.asnumpy())
        array[...] = values
        _send(parameter, array)


@contextmanager
def rewriting(parameters: Mapping[str, "Parameter"]) -> "Iterator[dict[str, np.ndarray]]":
    """Yield writable arrays by name; their content becomes the parameters'.

    They begin with the parameters' numbers.
    """
    import numpy as np

    if _in_place():
        yield {name: parameter.asnumpy() for name, parameter in parameters.items()}
        return
    arrays = {name: np.array(parameter.asnumpy()) for name, parameter in parameters.items()}
    yield arrays
    for name, parameter in parameters.items():
        _send(parameter, arrays[name])


def _send(parameter: "Parameter", array: "np.ndarray") -> None:
    """Copy an array to the device, in place.

    Compiled graphs see it there; they do not see `set_data`.
    """
    from mindspore import Tensor

    if array.size:
        parameter.copy_(Tensor(array))


def _in_place() -> bool:
    """Test that `asnumpy` gives a parameter's own memory."""
    import mindspore

    return mindspore.get_context("device_target") == "CPU"
