"""Hugging Face model folders: their configuration read, whole folders written."""

from collections.abc import Iterable, Iterator, Mapping
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from mindrlhf.checkpoint.hf_tensors import split
from mindrlhf.checkpoint.safetensors_file import write_safetensors
from mindrlhf.checkpoint.stored_tensor import STORAGE, StoredDtype
from mindrlhf.checkpoint.weight_source import INDEX_FILE, SINGLE_FILE
from mindrlhf.configs.images import PREPROCESSOR_FILE, has_image_settings, read_image_settings
from mindrlhf.configs.model import ModelConfig
from mindrlhf.configs.vision import with_image_settings
from mindrlhf.data.tokenizer import Tokenizer
from mindrlhf.errors import UserError
from mindrlhf.files.atomic import atomic_folder
from mindrlhf.files.json import read_json, write_json
from mindrlhf.files.text import is_there
from mindrlhf.models.parameters import ParameterSpec, parameter_table
from mindrlhf.parallel.buckets import buckets

CONFIG_FILE = "config.json"
GENERATION_FILE = "generation_config.json"
CARD_FILE = "README.md"
CURVE_FILE = "curves.png"  # shown in the card
FILLERS = ("pad_token_id", "bos_token_id")

# Files that a folder written here can hold; a folder with any other file is never replaced: it is somebody's.
_OWN_FILES = (CARD_FILE, CURVE_FILE, "*.json", "*.safetensors", "merges.txt", "tokenizer.model")


def read_hf_config(directory: str | Path, seeing: bool = False) -> ModelConfig:
    """Read the model configuration of a Hugging Face folder.

    seeing: also read models with images, which some commands run.

    Stop tokens come from `config.json` and `generation_config.json`, in that order (Qwen2.5-Instruct names one and
    two); padding and beginning tokens come from the second file if the first has none. Of a model that sees, the
    preparation of images comes from `preprocessor_config.json`, if it is there.
    """
    file = Path(directory, CONFIG_FILE)
    raw = read_json(file)
    config = ModelConfig.from_hf(raw, str(file), seeing)
    generation = generation_defaults(directory)
    tokens = {key: generation[key] for key in ("eos_token_id", *FILLERS) if generation.get(key) is not None}
    more = ModelConfig.from_hf({**raw, **tokens}, str(file.with_name(GENERATION_FILE)), seeing)
    ends = tuple(dict.fromkeys((*config.eos_token_ids, *more.eos_token_ids)))
    gaps = {key: getattr(more, key) for key in FILLERS if getattr(config, key) is None}
    if config.vision and has_image_settings(directory):
        gaps["vision"] = with_image_settings(config.vision, read_image_settings(directory), str(directory))
    return config.model_copy(update={"eos_token_ids": ends, **gaps})


def generation_defaults(directory: str | Path | None) -> dict[str, Any]:
    """Read a folder's sampling defaults; {} without a folder or the file."""
    path = directory and Path(directory, GENERATION_FILE)
    return read_json(path) if path and is_there(path) else {}


def save_hf(
    directory: str | Path,
    config: ModelConfig,
    tensors: Iterable[tuple[ParameterSpec, np.ndarray]],
    dtype: StoredDtype = "float32",
    tokenizer: Tokenizer | None = None,
    max_shard_bytes: int = 5 * 10**9,
    replace: bool = False,
    generation: Mapping[str, Any] | None = None,
    card: Mapping[str, bytes] | None = None,
) -> None:
    """Write a model folder, complete or not at all, tensor by tensor.

    tensors: (spec, full float32 array) for every parameter, in the order of `parameter_table(config)`.
    dtype: of the stored numbers. max_shard_bytes: a new file begins when a tensor would make this one larger.
    replace: exchange an earlier model folder as a whole. Without it, every non-empty folder is refused; with it, a
        folder that holds any other file.
    generation: sampling defaults to write (`generation_defaults`); tokens that end a response are the config's.
    card: files of the model card. Raises `ValueError` when `tensors` does not match the table.
    """
    if replace:
        check_replaceable(Path(directory))
    table = parameter_table(config)
    with atomic_folder(directory, replace) as folder:
        for name, content in companion_files(config, tokenizer, generation, card, dtype).items():
            (folder / name).write_bytes(content)
        _write_shards(folder, table, _checked(table, tensors), dtype, max_shard_bytes)


def companion_files(
    config: ModelConfig,
    tokenizer: Tokenizer | None,
    generation: Mapping[str, Any] | None = None,
    card: Mapping[str, bytes] | None = None,
    dtype: StoredDtype = "float32",
) -> dict[str, bytes]:
    """Build the files of a model folder except its weights, from arguments of `save_hf`."""
    tokens = {"bos_token_id": config.bos_token_id, "eos_token_id": list(config.eos_token_ids) or None}
    tokens["pad_token_id"] = config.pad_token_id
    known = {name: value for name, value in tokens.items() if value is not None}
    with TemporaryDirectory() as name:
        folder = Path(name)
        write_json(folder / CONFIG_FILE, {**config.to_hf(), "torch_dtype": dtype})
        write_json(folder / GENERATION_FILE, {**tokens, **(generation or {}), **known})
        if config.vision and config.vision.images:
            write_json(folder / PREPROCESSOR_FILE, config.vision.images.to_hf())
        for file, content in (card or {}).items():
            (folder / file).write_bytes(content)
        if tokenizer is not None:
            tokenizer.save(folder)
        return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def check_replaceable(directory: Path) -> None:
    """Check that `save_hf(replace=True)` will replace nothing or a model folder only."""
    if not directory.exists():
        return
    if not directory.is_dir():
        raise UserError(f"{directory}: is a file, and a folder is to be written there; give another name.")
    for path in directory.iterdir():
        if not path.is_file() or not any(path.match(pattern) for pattern in _OWN_FILES):
            raise UserError(f"{path}: is no part of a model, so its folder is not replaced; give a new folder.")


def _checked(
    table: tuple[ParameterSpec, ...], tensors: Iterable[tuple[ParameterSpec, np.ndarray]]
) -> Iterator[np.ndarray]:
    """Yield the tensors; ValueError if they are not in the table's order."""
    for expected, (spec, array) in zip(table, tensors, strict=True):
        if (spec.name, spec.hf_tensors) != (expected.name, expected.hf_tensors):
            raise ValueError(f"{spec.name} was given where {expected.name} is due")
        yield from (tensor for _, tensor in split(spec, array))


def _write_shards(
    folder: Path, table: tuple[ParameterSpec, ...], arrays: Iterator[np.ndarray], dtype: StoredDtype, max_bytes: int
) -> None:
    width = STORAGE[dtype].itemsize
    tensors = [tensor for spec in table for tensor in spec.hf_tensors]
    groups = buckets([prod(tensor.shape) * width for tensor in tensors], max_bytes)
    shards = [[tensors[index] for index in group] for group in groups]
    weight_map = {}
    for number, shard in enumerate(shards, start=1):
        name = SINGLE_FILE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        layout = [(tensor.name, tensor.shape) for tensor in shard]
        write_safetensors(folder / name, layout, arrays, dtype, {"format": "pt"})
        weight_map |= {tensor.name: name for tensor in shard}
    next(arrays, None)  # raises ValueError for more tensors than the model has
    if len(shards) > 1:
        total = sum(spec.size for spec in table) * width
        write_json(folder / INDEX_FILE, {"metadata": {"total_size": total}, "weight_map": weight_map})
