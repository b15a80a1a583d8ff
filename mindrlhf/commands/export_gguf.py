"""`mindrlhf export --gguf`: a model or an adapter as a GGUF file."""

import argparse
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mindrlhf.checkpoint.gguf.modelfile import check_modelfile, write_modelfile
from mindrlhf.checkpoint.gguf.vocabulary import describe_tokenizer
from mindrlhf.checkpoint.gguf.write import FILE_TYPES, write_adapter, write_model
from mindrlhf.checkpoint.hf import generation_defaults
from mindrlhf.checkpoint.local import SUFFIX, local_model
from mindrlhf.checkpoint.peft import StoredAdapter
from mindrlhf.checkpoint.resume import newest
from mindrlhf.checkpoint.tokenizer import stop_ids
from mindrlhf.checkpoint.weights import Reader, Weights, checkpoint_reader, hf_folder
from mindrlhf.configs.model import ModelConfig
from mindrlhf.data.tokenizer import Tokenizer
from mindrlhf.errors import UserError
from mindrlhf.metrics.progress import Progress, counted
from mindrlhf.model_roles import POLICY, ROLES
from mindrlhf.models.parameters import adapter_rows, parameter_table
from mindrlhf.rollout.generator import language_model
from mindrlhf.units import size


def export_gguf(args: argparse.Namespace) -> None:
    """Check a model and its tokenizer, then write the file and its Modelfile.

    Raises UserError.
    """
    if args.gguf.suffix != SUFFIX:
        raise UserError(f"--gguf {args.gguf}: the name of the file must end in {SUFFIX}.")
    source = local_model(str(args.checkpoint))
    config = language_model(source)
    if ROLES[args.role].value_head:
        raise UserError(f"--role {args.role}: has no vocabulary head, which GGUF files need; give --output a folder.")
    modelfile = check_modelfile(args.gguf.parent)
    folder = hf_folder(source)
    tokenizer = Tokenizer.from_path(folder)
    first, stored = Weights(source, config, 0).split() if args.role == POLICY.name else (None, None)
    if stored is None and (args.merge or args.base):
        raise UserError(f"{source}: holds whole weights of the {args.role}; leave out --merge and --base.")
    if stored is not None and not args.merge:
        written, lines = _write_adapter(args, config, stored)
    else:
        if args.role != POLICY.name:
            read = checkpoint_reader(newest(args.checkpoint), ROLES[args.role].checkpoint, config)
        elif stored is None:
            read = first.reader()
        else:
            read = replace(first, path=args.base or first.path).merged(stored)
        described = describe_tokenizer(tokenizer, config, str(folder))
        written, lines = _write_model(args, config, read, described)
    write_modelfile(modelfile, tokenizer, stop_ids(tokenizer, config), generation_defaults(folder), lines)
    print(f"{args.gguf}: {written}, {size(args.gguf.stat().st_size)}; {modelfile} describes it for ollama")


def _write_model(
    args: argparse.Namespace, config: ModelConfig, read: Reader, tokenizer: Mapping[str, Any]
) -> tuple[str, list[str]]:
    """Write a model; returns a description, and the Modelfile's lines of files."""
    kind = args.type or next(iter(FILE_TYPES))
    table = parameter_table(config)
    with Progress()("export", len(table), "tensors") as advance:
        tensors = counted(((spec, read(spec)) for spec in table), advance)
        write_model(args.gguf, config, tensors, FILE_TYPES[kind], tokenizer, args.gguf.stem)
    return f"{len(table)} tensors, {kind}", [f"FROM ./{args.gguf.name}"]


def _write_adapter(args: argparse.Namespace, config: ModelConfig, stored: StoredAdapter) -> tuple[str, list[str]]:
    """Write an adapter; returns a description, and the Modelfile's lines of files."""
    if args.type is not None:
        raise UserError(f"--type {args.type} is of models, and an adapter is float32; leave it out or add --merge.")
    adapted = config.model_copy(update={"adapter": stored.adapter})
    write_adapter(args.gguf, adapted, stored.arrays, args.gguf.stem)
    base = "# The base model: its name in ollama, or its file, which `mindrlhf export --gguf` writes too."
    count = len(adapter_rows(adapted))
    return f"the adapter, {count} tensors, f32", [base, "FROM ./base.gguf", f"ADAPTER ./{args.gguf.name}"]
