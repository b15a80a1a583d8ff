"""The planner over files: weights of any layout to any other, without a job.

Each output file is written front to back, each tensor put together from exactly the parts that it needs, so that about
one tensor is in memory. Outputs appear complete or not at all; sources are only read.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Literal

import numpy as np

from mindrlhf.checkpoint.ckpt_file import write_ckpt
from mindrlhf.checkpoint.encoding import StoredDtype
from mindrlhf.checkpoint.hf import save_hf
from mindrlhf.checkpoint.safetensors_file import write_safetensors
from mindrlhf.checkpoint.sharded_weights import ShardedWeights
from mindrlhf.checkpoint.stored_tensor import StoredTensor
from mindrlhf.checkpoint.weight_source import common_dtype
from mindrlhf.configs.model import ModelConfig
from mindrlhf.errors import UserError
from mindrlhf.files.atomic import atomic_file, atomic_folder
from mindrlhf.models.parameters import parameter_table
from mindrlhf.parallel.layout import Layout, Shape, Slices, full_layout, sliced_shape
from mindrlhf.reshard.plan import Plan, plan

FileFormat = Literal["safetensors", "ckpt"]
Advance = Callable[[int], None]


def write_ranks(
    weights: ShardedWeights,
    layout: Layout,
    folder: Path,
    *,
    prefix: str,
    file_format: FileFormat,
    advance: Advance,
    processes: int = 1,
    only_rank: int | None = None,
) -> None:
    """Write `rank_R/<prefix>R.<file_format>` for every rank of `layout`, or for `only_rank`.

    The folder, or the one rank's folder within it, appears when it is complete; one that is not empty is refused.
    processes: that write, each a rank's file at a time. advance: called with each finished file.
    """
    pieces = plan(weights.layout, layout)
    with atomic_folder(folder if only_rank is None else folder / f"rank_{only_rank}") as temporary:
        jobs = []
        for rank in range(layout.size) if only_rank is None else [only_rank]:
            place = temporary / f"rank_{rank}" if only_rank is None else temporary
            place.mkdir(exist_ok=True)
            jobs.append(_File(place / f"{prefix}{rank}.{file_format}", _assemblies(weights, pieces, rank)))
        if processes > 1 and len(jobs) > 1:
            _write_in_processes(jobs, min(processes, len(jobs)), advance, folder)
        else:
            for job in jobs:
                job.write()
                advance(1)


def rank_reader(weights: ShardedWeights, layout: Layout, rank: int) -> Callable[[str], np.ndarray]:
    """Return a reader of the float32 parts that `rank` holds in `layout`."""
    by_name = {assembly.name: assembly for assembly in _assemblies(weights, plan(weights.layout, layout), rank)}
    return lambda name: by_name[name].read()


def write_full(weights: ShardedWeights, file: Path, advance: Advance) -> None:
    """Write all weights into one new `.safetensors` or `.ckpt` file under our names.

    advance: called with each tensor. Raises `UserError` for an existing file and when writing fails.
    """
    if file.exists():
        raise UserError(f"{file}: exists already; remove it or give another name.")
    with atomic_file(file) as temporary:
        _File(temporary, _gathered(weights)).write(advance)


def write_hf(weights: ShardedWeights, model: ModelConfig, folder: Path, advance: Advance) -> None:
    """Write a Hugging Face folder of the parameters of a model, in table order."""
    tensors = zip(parameter_table(model), _read(_gathered(weights), advance), strict=True)
    save_hf(folder, model, tensors, common_dtype(weights.dtypes.values()))


@dataclass(frozen=True)
class _Assembly:
    """One tensor of an output, and the stored parts that it consists of.

    dtype: as it is stored. parts: (tensor in a file, box inside of it, box inside of this one).
    """

    name: str
    shape: Shape
    dtype: StoredDtype
    parts: tuple[tuple[StoredTensor, Slices, Slices], ...]

    def read(self) -> np.ndarray:
        """Read the tensor in float32, with at most one more part in memory."""
        if len(self.parts) == 1:
            stored, taken, _ = self.parts[0]
            return stored.read(taken)
        array = np.empty(self.shape, np.float32)
        for stored, taken, put in self.parts:
            array[put] = stored.read(taken)
        return array


@dataclass(frozen=True)
class _File:
    """One self-contained output file, which any process can write."""

    path: Path
    tensors: Sequence[_Assembly]

    def write(self, advance: Advance = lambda count: None) -> None:
        """Write it; not atomic by itself."""
        dtypes = {tensor.name: tensor.dtype for tensor in self.tensors}
        arrays = _read(self.tensors, advance)
        if self.path.suffix == ".ckpt":
            write_ckpt(self.path, zip(dtypes, arrays, strict=True), dtypes)
        else:
            shapes = [(tensor.name, tensor.shape) for tensor in self.tensors]
            write_safetensors(self.path, shapes, arrays, dtypes, {"format": "ms"})


def _read(tensors: Sequence[_Assembly], advance: Advance) -> Iterator[np.ndarray]:
    for tensor in tensors:
        yield tensor.read()
        advance(1)


def _assemblies(weights: ShardedWeights, plan: Plan, rank: int) -> list[_Assembly]:
    """List the tensors that a rank gets, and their stored parts."""
    incoming, dtypes = plan.incoming(rank), weights.dtypes
    return [
        _Assembly(
            name,
            sliced_shape(part),
            dtypes[name],
            tuple((weights.ranks[t.source][name], t.source_slices, t.destination_slices) for t in incoming[name]),
        )
        for name, part in plan.destination.shards(rank)
    ]


def _gathered(weights: ShardedWeights) -> list[_Assembly]:
    return _assemblies(weights, plan(weights.layout, full_layout(weights.layout.shapes)), 0)


def _write_in_processes(jobs: list[_File], processes: int, advance: Advance, folder: Path) -> None:
    """Write files in fresh processes: the progress bar's thread does not survive a fork."""
    with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
        try:
            for done in as_completed([pool.submit(job.write) for job in jobs]):
                done.result()
                advance(1)
        except BrokenProcessPool:
            raise UserError(
                f"{folder}: a process was killed, perhaps for lack of memory; set --transform_process_num to fewer."
            ) from None
        finally:
            pool.shutdown(cancel_futures=True)
