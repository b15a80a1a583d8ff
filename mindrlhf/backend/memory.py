"""Temporary release of parameter memory, unnoticed by compiled graphs.

In host memory (CPU) a parameter's pages return to the operating system and its content goes to a file; its address
stays the same, because compiled graphs hold it. From a device (Ascend) MindSpore moves the parameter to host memory.
"""

import ctypes
import mmap
import os
import tempfile
import weakref
from collections.abc import Callable, Sequence
from io import FileIO
from pathlib import Path
from typing import Protocol

import numpy as np

from mindrlhf.backend.device import Device
from mindrlhf.backend.devices import device_in_use
from mindrlhf.errors import UserError

_LIBC = ctypes.CDLL(None, use_errno=True)
_MADV_DONTNEED = 4
_MADV_POPULATE_WRITE = 23  # since Linux 5.14; older kernels refuse it


class Store(Protocol):
    """Store for the parameters of one role; it can move `nbytes` of them."""

    nbytes: int

    def put_away(self, keep: bool) -> None:
        """Free the memory.

        keep: the content is needed again. Otherwise the parameters come back as zeros, or with the content of the last
        `put_away` with `keep`.
        """

    def bring_back(self) -> None:
        """Restore the memory, with the content that was kept last."""

    def fill(self) -> None:
        """Allocate all memory now, which is faster than page by page later."""

    def expect(self) -> None:
        """Prefetch in the background, outside this process's memory, for a fast `bring_back`."""


def open_store(device: Device, parameters: Sequence, folder: Path) -> Store:
    """Open a device's store; its files go to `folder`."""
    return STORES[device.swap](parameters, folder)


class FileStore:
    """Store of host memory: pages go to an unnamed file.

    Incomplete first and last pages of a parameter stay in memory. Raises `UserError` when the file cannot be written;
    all content is still in memory then.
    """

    def __init__(self, parameters: Sequence, folder: Path):
        self._parameters = parameters
        self._folder = folder
        self.nbytes = sum(pages.nbytes for pages in self._pages())
        self._file: FileIO | None = None

    def put_away(self, keep: bool) -> None:
        if keep:
            self._write()
        for pages in self._pages():
            _give_back(pages)

    def bring_back(self) -> None:
        if self._file:  # otherwise nothing was kept: the pages are zeros when they are next used
            self._move(lambda file, content, offset: os.preadv(file, [content], offset))

    def fill(self) -> None:
        for pages in self._pages():
            _advise(pages, _MADV_POPULATE_WRITE)

    def expect(self) -> None:
        """Make the operating system read the file into its cache."""
        if self._file:
            os.posix_fadvise(self._file.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)

    def _write(self) -> None:
        try:
            if not self._file:
                self._folder.mkdir(parents=True, exist_ok=True)
                self._file = tempfile.TemporaryFile(dir=self._folder, buffering=0)  # noqa: SIM115
                weakref.finalize(self, self._file.close)
            self._move(lambda file, content, offset: os.pwrite(file, content, offset))
        except OSError as error:
            found = f"memory.swap_dir: {self._folder} cannot take {self.nbytes / 1e9:.2f} GB ({error.strerror})"
            raise UserError(f"{found}; make room there, give another folder, or set memory.swap to False.") from None

    def _move(self, some: Callable[[int, memoryview, int], int]) -> None:
        """Read or write all pages; `some(file, content, offset)` returns the bytes moved."""
        offset = 0
        for pages in self._pages():
            rest = memoryview(pages)
            while rest:
                count = some(self._file.fileno(), rest[: 1 << 30], offset)
                if not count:
                    raise OSError(f"{self._folder}: the swap file is shorter than what was written to it")
                rest = rest[count:]
                offset += count

    def _pages(self) -> list[np.ndarray]:
        """View whole pages as bytes; called each time, because they may move."""
        return [_whole_pages(parameter.asnumpy()) for parameter in self._parameters]


class HostStore:
    """Store of a device: MindSpore moves parameters to the host's memory; not run here."""

    def __init__(self, parameters: Sequence, folder: Path):
        self._parameters = parameters
        self.nbytes = sum(parameter.nbytes for parameter in parameters)

    def put_away(self, keep: bool) -> None:
        for parameter in self._parameters:
            parameter._offload()

    def bring_back(self) -> None:
        for parameter in self._parameters:
            parameter._load()

    def fill(self) -> None:
        """Do nothing: device memory is allocated as a whole or not at all."""

    def expect(self) -> None:
        """Do nothing: host memory is fast, and `_load` always waits."""


STORES = {"file": FileStore, "host": HostStore}  # by `Device.swap`


def zero_parameter(name: str, shape: Sequence[int], dtype: str = "float32"):
    """Make a Parameter of zeros, in host memory without pages until written to."""
    import mindspore
    from mindspore import Parameter, Tensor

    zeros = Tensor(np.zeros(shape, np.float32 if "float" in dtype else dtype), getattr(mindspore, dtype))
    parameter = Parameter(zeros, name=name, requires_grad=False)
    if device_in_use().in_host_memory:
        _give_back(_whole_pages(parameter.asnumpy()))
    return parameter


def _whole_pages(array: np.ndarray) -> np.ndarray:
    flat = array.reshape(-1).view(np.uint8)
    start = -flat.ctypes.data % mmap.PAGESIZE
    end = max(start, flat.nbytes - (flat.ctypes.data + flat.nbytes) % mmap.PAGESIZE)
    return flat[start:end]


def _give_back(pages: np.ndarray) -> None:
    if number := _advise(pages, _MADV_DONTNEED):
        raise OSError(number, f"madvise: {os.strerror(number)}")


def _advise(pages: np.ndarray, advice: int) -> int:
    """Call `madvise`; returns 0, or the error number."""
    failed = pages.nbytes and _LIBC.madvise(ctypes.c_void_p(pages.ctypes.data), ctypes.c_size_t(pages.nbytes), advice)
    return ctypes.get_errno() if failed else 0
