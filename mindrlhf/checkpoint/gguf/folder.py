"""GGUF files as Hugging Face folders: converted once, kept in the user's cache.

A folder, and not one more kind of weight source, because everything behind a model's path then stays as it is: ranks
read their parts from it, and fingerprints, adapters, checkpoints and resumed runs name it. Blocks of 4 bits would also
have to be dequantised again by each rank at each start.
"""

import fcntl
import hashlib
import logging
import re
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mindrlhf.checkpoint.gguf.file import GgufFile, read_gguf
from mindrlhf.checkpoint.gguf.model import check_weights, model_config, read_weights, stored_dtype
from mindrlhf.checkpoint.gguf.tokenizer import read_tokenizer
from mindrlhf.checkpoint.hf import CONFIG_FILE, save_hf
from mindrlhf.checkpoint.stored_tensor import STORAGE, StoredDtype
from mindrlhf.configs.model import ModelConfig
from mindrlhf.errors import UserError
from mindrlhf.files.atomic import clean, make_folder
from mindrlhf.files.text import reading
from mindrlhf.files.user_cache import user_cache
from mindrlhf.metrics.progress import Advance, Progress, counted
from mindrlhf.models.parameters import parameter_count, parameter_table
from mindrlhf.units import size

FOLDER = "gguf"  # in the user's cache
CONVERSION = 1  # number of this way to convert; another one makes new folders
LOCK = "lock"

_BLOCK = 1 << 22  # bytes read at a time
_log = logging.getLogger(__name__)


def cached_folder(file: Path) -> Path:
    """Find a GGUF file's Hugging Face folder in the user's cache, or make it.

    Its place follows from the file's content. Processes that need it at once wait for the one that makes it. Raises
    UserError for a damaged file, a model of another family, and a full disk.
    """
    name = re.sub(r"[^\w.-]", "_", file.stem)[:80]
    place = user_cache() / FOLDER / _digest(file)
    folder = place / name
    if not (folder / CONFIG_FILE).is_file():
        make_folder(place)
        with _locked(place / LOCK):
            clean(place)
            if not (folder / CONFIG_FILE).is_file():
                _convert(file, folder)
    return folder


def write_folder(
    content: GgufFile, config: ModelConfig, folder: Path, dtype: StoredDtype, advance: Advance = lambda count: None
) -> None:
    """Write the model of a GGUF file as a Hugging Face folder.

    The folder appears complete or not at all. Raises UserError.
    """
    tokenizer = read_tokenizer(content)
    if tokenizer.size > config.vocab_size:
        found = f"{content.path}: its tokenizer has {tokenizer.size} tokens, and its embedding {config.vocab_size}"
        raise UserError(f"{found}; get it again.")
    save_hf(folder, config, counted(read_weights(content, config), advance), dtype, tokenizer)


def open_gguf(file: Path) -> tuple[GgufFile, ModelConfig]:
    """Read a file's head and architecture, and check for its weights. Raises UserError."""
    content = read_gguf(file)
    config = model_config(content)
    check_weights(content, config)
    return content, config


def _convert(file: Path, folder: Path) -> None:
    """Write a file's folder in the cache, and say so on the error stream."""
    began = time.monotonic()
    content, config = open_gguf(file)
    dtype = stored_dtype(content, config)
    needed = parameter_count(config) * STORAGE[dtype].itemsize
    free = shutil.disk_usage(folder.parent).free
    if needed > free:
        found = f"{file}: needs {size(needed)} in {folder.parent} as {dtype}, and {size(free)} are free"
        raise UserError(f"{found}; free some space, or set XDG_CACHE_HOME to a folder on a larger disk.")
    with Progress(stream=sys.stderr)("convert", len(parameter_table(config)), "tensors") as advance:
        write_folder(content, config, folder, dtype, advance)
    types = ", ".join(content.types)
    spent = time.monotonic() - began
    count = f"{parameter_count(config):,} weights of {len(parameter_table(config))} tensors"
    made = f"{count} ({types}) written as {dtype} to {folder} in {spent:.1f} s"
    print(f"{file}: {made}; later runs read them there", file=sys.stderr, flush=True)


def _digest(file: Path) -> str:
    """Compute the name of a file's content, and of the way to convert it."""
    digest = hashlib.sha256(f"{CONVERSION} ".encode())
    with reading(file), file.open("rb") as opened:
        while block := opened.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()[:16]


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Wait until no other process has the lock.

    A file system without locks lets all processes go on.
    """
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError:
            _log.warning("%s: its file system has no locks; let one process convert at a time", path.parent)
        yield
