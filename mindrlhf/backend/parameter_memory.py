"""Reading and writing of parameters; compiled graphs see the writes.

In host memory both use the parameter's own buffer; elsewhere (not run there) a write copies back to the device. NumPy
is imported inside functions: its threads must not start before `run.stop_signals` has blocked signals in them.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from mindrlhf.backend.devices import device_in_use

if TYPE_CHECKING:
    import numpy as np
    from mindspore import Parameter


def read(parameter: "Parameter") -> "np.ndarray":
    """Read a parameter: in host memory its own buffer, read-only, elsewhere a copy."""
    numbers = parameter.asnumpy().view()
    numbers.flags.writeable = False
    return numbers


def dtype_of(parameter: "Parameter") -> "np.dtype":
    """Return the dtype that `read` gives, without reading."""
    import mindspore
    import numpy as np

    return np.dtype(mindspore.dtype_to_nptype(parameter.dtype))


def read_all(parameters: Mapping[str, "Parameter"]) -> "dict[str, np.ndarray]":
    return {name: read(parameter) for name, parameter in parameters.items()}


def write(parameter: "Parameter", values: "np.ndarray | float") -> None:
    """Set a parameter to an array of its shape, or one number."""
    import numpy as np

    if np.ndim(values) and np.shape(values) != parameter.shape:
        raise ValueError(f"{parameter.name} has shape {list(parameter.shape)}, not {list(np.shape(values))}")
    with rewriting({"": parameter}) as arrays:
        arrays[""][...] = values


@contextmanager
def rewriting(parameters: Mapping[str, "Parameter"]) -> "Iterator[dict[str, np.ndarray]]":
    """Yield writable arrays by name, with the parameters' values; changes reach the parameters."""
    from mindspore import Tensor

    arrays = {name: parameter.asnumpy() for name, parameter in parameters.items()}
    if device_in_use().in_host_memory:
        yield arrays
        return
    arrays = {name: array.copy() for name, array in arrays.items()}
    yield arrays
    for name, parameter in parameters.items():
        if arrays[name].size:
            parameter.copy_(Tensor(arrays[name]))  # compiled graphs see this; they do not see `set_data`
