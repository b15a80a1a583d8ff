"""Inputs of every command with a model: tokenizer, architecture, weights."""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mindrlhf.checkpoint.hf import CONFIG_FILE, read_hf_config
from mindrlhf.checkpoint.resume import Checkpoint, is_checkpoint, newest
from mindrlhf.checkpoint.sharded_weights import open_sharded, rank_folders
from mindrlhf.checkpoint.training_state import WEIGHTS
from mindrlhf.configs.model import ModelConfig
from mindrlhf.data.tokenizer import Tokenizer
from mindrlhf.errors import UserError
from mindrlhf.models.families import FAMILIES
from mindrlhf.models.parameters import ParameterSpec, parameter_table
from mindrlhf.parallel.layout import full_layout
from mindrlhf.parallel.partition import Partition


def hf_folder(path: str | Path) -> Path | None:
    """Find the Hugging Face folder of a checkpoint, or None.

    It is the path itself, or the folder within a training checkpoint.
    """
    if (Path(path) / CONFIG_FILE).is_file():
        return Path(path)
    return newest(path, Checkpoint.verify_description).hf_folder if is_checkpoint(path) else None


def checkpoint_config(path: str | None) -> ModelConfig | None:
    """Read the architecture of a checkpoint; None without a configuration."""
    if path is None:
        return None
    if not Path(path).exists():
        raise UserError(f"{path}: no such checkpoint; give an HF directory, a .safetensors or a .ckpt file.")
    folder = hf_folder(path)
    return None if folder is None else read_hf_config(folder)


def open_tokenizer(args: argparse.Namespace, checkpoint: str | None) -> Tokenizer:
    """Open the tokenizer that the flags name, or the checkpoint's own.

    The flags are `--vocab_path` and `--merges_file_path`, or `--tokenizer_path`.
    """
    if args.vocab_path or args.merges_file_path:
        if not (args.vocab_path and args.merges_file_path):
            raise UserError("--vocab_path and --merges_file_path belong together; give both, or --tokenizer_path.")
        return Tokenizer.from_files(args.vocab_path, args.merges_file_path)
    if args.tokenizer_path or checkpoint:
        return Tokenizer.from_path(args.tokenizer_path or hf_folder(checkpoint) or checkpoint)
    raise UserError("no tokenizer is given; use --vocab_path with --merges_file_path, or --tokenizer_path.")


def check_token_ids(tokenizer: Tokenizer, model: ModelConfig, largest: int, where: str) -> None:
    """Check that all token ids are rows of the model's embedding.

    largest: the largest token id of the dataset `where`. The tokenizer's ids are checked too.
    """
    if tokenizer.size > model.vocab_size:
        raise UserError(
            f"the tokenizer has {tokenizer.size} tokens and the model's vocab_size is {model.vocab_size}; "
            f"give the vocab.json and merges.txt of this model."
        )
    if largest >= tokenizer.size:
        raise UserError(
            f"{where}: token id {largest} is beyond the tokenizer's {tokenizer.size} tokens; "
            f"convert the data with the vocab.json and merges.txt that are given here."
        )


def stop_ids(tokenizer: Tokenizer, model: ModelConfig) -> tuple[int, ...]:
    """Collect the tokens that end a response.

    They are the model's, the tokenizer's end of text, and the family's.
    """
    ends = map(tokenizer.token_to_id, FAMILIES[model.family].end_tokens)
    own = {*model.eos_token_ids, tokenizer.eos_token_id, *ends}
    return tuple(sorted(i for i in own if i is not None and i < model.vocab_size))


def stopping_config(tokenizer: Tokenizer, model: ModelConfig) -> ModelConfig:
    """Add all tokens that end a response to the model's configuration.

    An exported model then stops as in training.
    """
    every = (*model.eos_token_ids, *stop_ids(tokenizer, model))
    return model.model_copy(update={"eos_token_ids": tuple(dict.fromkeys(every))})


@dataclass(frozen=True)
class Weights:
    """Origin of a role's parameters. path None: random from the seed."""

    path: str | None
    model: ModelConfig
    seed: int

    def parameters(self, part: Partition | None = None) -> dict:
        """Create float32 parameters by name: the whole model's, or one rank's.

        The path may be a training checkpoint in any layout; with `part` it may also hold one folder a rank, written in
        the layout of `part`.
        """
        from mindrlhf.models.initialize import build_parameters

        return build_parameters(parameter_table(self.model) if part is None else part.specs, self.reader(part))

    def reader(self, part: Partition | None = None) -> Callable[[ParameterSpec], np.ndarray]:
        """Return a reader of whole parameters, or of one rank's parts.

        See `parameters`.
        """
        from mindrlhf.checkpoint.weight_source import open_weights
        from mindrlhf.models.initialize import random_tensor

        def index(spec):
            return None if part is None else part.slices(spec)

        if self.path is None:
            return lambda spec: random_tensor(spec, self.model, self.seed)[index(spec) or ...]
        if not (Path(self.path) / CONFIG_FILE).is_file() and is_checkpoint(self.path):
            return checkpoint_reader(newest(self.path), WEIGHTS, self.model, part)
        if part is not None and rank_folders(Path(self.path)):
            tensors = open_sharded(Path(self.path), part.layout).ranks[part.rank]
            return lambda spec: tensors[spec.name].read()
        source = open_weights(self.path, self.model)
        return lambda spec: source.read(spec, index(spec))


def checkpoint_reader(
    checkpoint: Checkpoint, kind: str, model: ModelConfig, part: Partition | None = None
) -> Callable[[ParameterSpec], np.ndarray]:
    """Return a reader of a training checkpoint's parameters, or one rank's parts.

    The parameters are those of `model` that train.
    """
    shapes = {spec.name: spec.shape for spec in parameter_table(model) if spec.trains}
    layout = full_layout(shapes) if part is None else part.layout.only(shapes)
    read = checkpoint.reader(kind, layout, 0 if part is None else part.rank)
    return lambda spec: read(spec.name)


def continued_reader(checkpoint: Checkpoint, first: Weights, part: Partition) -> Callable[[ParameterSpec], np.ndarray]:
    """Return a reader of one rank's policy when a run continues.

    Parameters that do not train are still the first ones.
    """
    read = checkpoint_reader(checkpoint, WEIGHTS, part.model, part)
    if part.trained_layout == part.layout:
        return read
    unchanged = first.reader(part)
    return lambda spec: (read if spec.trains else unchanged)(spec)
