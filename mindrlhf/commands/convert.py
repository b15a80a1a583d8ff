"""`mindrlhf convert`: Hugging Face folders, MindSpore files and GGUF files.

Folders become MindSpore files, these become folders again, and GGUF files become folders. The MindSpore files have
MindFormers names.
"""

import argparse
from pathlib import Path

from mindrlhf.checkpoint.adapted import base_path
from mindrlhf.checkpoint.hf import CONFIG_FILE, read_hf_config, save_hf
from mindrlhf.checkpoint.local import gguf_file, local_model
from mindrlhf.checkpoint.peft import StoredAdapter, is_adapter, read_adapter
from mindrlhf.checkpoint.stored_tensor import StoredDtype
from mindrlhf.checkpoint.weight_source import WeightSource, fingerprint, open_weights, write_weights
from mindrlhf.configs.model import ModelConfig
from mindrlhf.configs.model_yaml import load_model_yaml
from mindrlhf.errors import UserError
from mindrlhf.files.atomic import atomic_file
from mindrlhf.files.shipped import names_yaml
from mindrlhf.metrics.progress import Progress, counted
from mindrlhf.models.parameters import parameter_table

SUFFIXES = (".ckpt", ".safetensors")
DTYPES: dict[str, StoredDtype] = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    source = "Hugging Face folder, GGUF file, or an adapter in PEFT's format, which is merged"
    add("--torch_ckpt_dir", required=True, help=f"{source}; with --reverse or --gguf the Hugging Face folder to write")
    add("--mindspore_ckpt_path", help="file with MindFormers names, .ckpt (default) or .safetensors")
    add("--gguf", help="GGUF file, or a folder with one, to write as the Hugging Face folder --torch_ckpt_dir")
    add("--dtype", choices=DTYPES, help="how numbers are stored (default: as they are in the source)")
    add("--config_path", help="model YAML, config.json or its folder (default: config.json next to the weights)")
    add("--adapter", help="adapter in PEFT's format, merged into the weights")
    add("--reverse", "--reversed", action="store_true", help="from the MindSpore file to Hugging Face")


def run(args: argparse.Namespace) -> None:
    """Convert one tensor at a time; bit for bit unless the dtype changes."""
    if args.gguf is not None:
        _convert_gguf(args)
        return
    if args.mindspore_ckpt_path is None:
        raise UserError("--mindspore_ckpt_path is missing; give the file with MindFormers names, or --gguf.")
    folder = Path(args.torch_ckpt_dir if args.reverse else local_model(args.torch_ckpt_dir))
    file = _mindspore_file(args.mindspore_ckpt_path)
    origin, target = (file, folder) if args.reverse else (folder, file)
    adapter = args.adapter
    if not origin.exists():
        flag = "--mindspore_ckpt_path" if args.reverse else "--torch_ckpt_dir"
        raise UserError(f"{flag} {origin}: there is no such {'file' if args.reverse else 'folder'}.")
    if adapter is None and is_adapter(origin):
        origin, adapter = Path(base_path(origin)), origin
    config = _config(args.config_path, origin)
    source = open_weights(origin, config)
    merged = _adapter(adapter, source, config) if adapter else None
    if any(target.resolve() in (file.resolve(), *file.resolve().parents) for file in source.files):
        raise UserError(f"{target}: holds the weights that are to be read; give another output.")
    dtype = DTYPES[args.dtype] if args.dtype else source.dtype
    table = parameter_table(config)
    with Progress()("convert", len(table), "tensors") as advance:
        weights = (source.read(spec.name) for spec in table)
        arrays = counted(map(merged.merged, table, weights) if merged else weights, advance)
        if args.reverse:
            save_hf(folder, config, zip(table, arrays, strict=True), dtype)
        else:
            with atomic_file(file) as temporary:
                write_weights(temporary, source.shapes, arrays, dtype)
    print(f"{target}: {len(table)} tensors, {sum(spec.size for spec in table):,} parameters, {dtype}")


def _convert_gguf(args: argparse.Namespace) -> None:
    """Write a GGUF file's model, tokenizer and chat template as a Hugging Face folder."""
    from mindrlhf.checkpoint.gguf.folder import open_gguf, write_folder
    from mindrlhf.checkpoint.gguf.model import stored_dtype

    for flag in ("mindspore_ckpt_path", "config_path", "adapter", "reverse"):
        if getattr(args, flag):
            raise UserError(f"--{flag} does not go with --gguf, which writes --torch_ckpt_dir; leave it out.")
    file = gguf_file(Path(args.gguf))
    if file is None:
        raise UserError(f"--gguf {args.gguf}: there is no such file, and no folder with one; give a GGUF file.")
    content, config = open_gguf(file)
    dtype = DTYPES[args.dtype] if args.dtype else stored_dtype(content, config)
    table = parameter_table(config)
    with Progress()("convert", len(table), "tensors") as advance:
        write_folder(content, config, Path(args.torch_ckpt_dir), dtype, advance)
    count = f"{len(table)} tensors, {sum(spec.size for spec in table):,} parameters"
    print(f"{args.torch_ckpt_dir}: {count}, {dtype} of {', '.join(content.types)}")


def _mindspore_file(text: str) -> Path:
    """Add the ending to a path; digits after a dot (`qwen2.5`) are none."""
    file = Path(text)
    if file.suffix in SUFFIXES:
        return file
    if file.suffix[1:].isalpha():
        raise UserError(f"--mindspore_ckpt_path {file}: the name must end in {' or '.join(SUFFIXES)}.")
    return file.with_name(f"{file.name}{SUFFIXES[0]}")


def _config(config_path: str | None, weights: Path) -> ModelConfig:
    """Read the model's configuration: from the flags, or next to the weights."""
    beside = weights if weights.is_dir() else weights.parent
    found = read_hf_config(beside, seeing=True) if (beside / CONFIG_FILE).is_file() else None
    if config_path is None:
        if found is None:
            raise UserError(f"{beside}: has no {CONFIG_FILE} that describes the model; name one with --config_path.")
        return found
    path = Path(config_path)
    if names_yaml(path):
        return load_model_yaml(path).architecture(found, str(beside / CONFIG_FILE))
    return read_hf_config(path.parent if path.name == CONFIG_FILE else path, seeing=True)


def _adapter(folder: str | Path, source: WeightSource, config: ModelConfig) -> StoredAdapter:
    """Read an adapter, and check that it fits these weights."""
    stored = read_adapter(folder)
    stored.check_fits(config, str(source.path))
    if stored.base.fingerprint is not None:
        stored.check_base(fingerprint(parameter_table(config), source.read), str(source.path))
    return stored
