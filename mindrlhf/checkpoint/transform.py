"""Conversion of weights from any layout to any other, without a job.

Each output file is written front to back, each tensor put together from exactly the parts that it needs, so that about
one tensor is in memory. Outputs appear complete or not at all; sources are only read.
"""

import itertools
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from pathlib import Path
from typing import Literal

from mindrlhf.checkpoint.hf import save_hf
from mindrlhf.checkpoint.weight_source import WeightSource, write_weights
from mindrlhf.configs.model import ModelConfig
from mindrlhf.errors import UserError
from mindrlhf.files.atomic import atomic_file, atomic_folder
from mindrlhf.metrics.progress import Advance, counted
from mindrlhf.models.parameters import parameter_table
from mindrlhf.parallel.layout import Layout, Slices, full_layout, sliced_shape

FileFormat = Literal["safetensors", "ckpt"]


def write_ranks(
    weights: WeightSource,
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

    The folder, or the one rank's folder within it, appears when it is complete; a non-empty one is refused. processes:
    writing processes, each with one rank's file at a time. advance: called for each finished file.
    """
    with atomic_folder(folder if only_rank is None else folder / f"rank_{only_rank}") as temporary:
        jobs = []
        for rank in layout.ranks if only_rank is None else [only_rank]:
            place = temporary / f"rank_{rank}" if only_rank is None else temporary
            place.mkdir(exist_ok=True)
            parts = dict(layout.shards(rank))
            jobs.append((weights.only(parts), parts, place / f"{prefix}{rank}.{file_format}"))
        if processes > 1 and len(jobs) > 1:
            _write_in_processes(jobs, min(processes, len(jobs)), advance, folder)
        else:
            for job in jobs:
                _write(*job)
                advance(1)


def write_full(weights: WeightSource, file: Path, advance: Advance) -> None:
    """Write all weights into one new `.safetensors` or `.ckpt` file under our names."""
    if file.exists():
        raise UserError(f"{file}: exists already; remove it or give another name.")
    with atomic_file(file) as temporary:
        _write(weights, dict(full_layout(weights.shapes).shards(0)), temporary, advance)


def write_hf(weights: WeightSource, model: ModelConfig, folder: Path, advance: Advance) -> None:
    """Write a Hugging Face folder of the parameters of a model, in table order."""
    tensors = ((spec, weights.read(spec.name)) for spec in parameter_table(model))
    save_hf(folder, model, counted(tensors, advance), weights.dtype)


def _write(
    weights: WeightSource, parts: Mapping[str, Slices], file: Path, advance: Advance = lambda count: None
) -> None:
    """Write parts of parameters into one file; not atomic by itself."""
    shapes = {name: sliced_shape(part) for name, part in parts.items()}
    write_weights(file, shapes, counted(itertools.starmap(weights.read, parts.items()), advance), weights.dtypes)


def _write_in_processes(jobs: list[tuple], processes: int, advance: Advance, folder: Path) -> None:
    """Write files in fresh processes: the progress bar's thread does not survive a fork."""
    with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
        try:
            for done in as_completed([pool.submit(_write, *job) for job in jobs]):
                done.result()
                advance(1)
        except BrokenProcessPool:
            found = f"{folder}: a process was killed, perhaps for lack of memory"
            raise UserError(f"{found}; set --transform_process_num to fewer.") from None
        finally:
            pool.shutdown(cancel_futures=True)
