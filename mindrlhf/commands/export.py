"""`mindrlhf export`: the model of a training checkpoint as a Hugging Face folder.

The checkpoint may have any layout.
"""

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from mindrlhf.checkpoint.hf import CARD_FILE, generation_defaults, read_hf_config, save_hf
from mindrlhf.checkpoint.open import checkpoint_reader
from mindrlhf.checkpoint.resume import Checkpoint, newest
from mindrlhf.checkpoint.training_state import CRITIC_WEIGHTS, REFERENCE_WEIGHTS, WEIGHTS
from mindrlhf.commands.convert import DTYPES
from mindrlhf.data.tokenizer import Tokenizer
from mindrlhf.metrics.progress import Progress
from mindrlhf.models.parameters import ParameterSpec, parameter_table

ROLES = {"policy": WEIGHTS, "critic": CRITIC_WEIGHTS, "reference": REFERENCE_WEIGHTS}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of `mindrlhf export`."""
    parser.add_argument(
        "--checkpoint", required=True, type=Path, help="step_N folder, latest, best, or a folder of checkpoints"
    )
    parser.add_argument("--output", required=True, type=Path, help="Hugging Face folder to write")
    parser.add_argument("--dtype", choices=DTYPES, default="fp32", help="how numbers are stored (default fp32)")
    parser.add_argument("--role", choices=ROLES, default="policy", help="whose weights (default policy)")


def run(args: argparse.Namespace) -> None:
    """Check the checkpoint, then write one tensor at a time.

    The folder appears complete or not at all.
    """
    checkpoint = newest(args.checkpoint)
    config = read_hf_config(checkpoint.hf_folder)
    config = config.as_critic() if args.role == "critic" else config
    tokenizer = Tokenizer.from_path(checkpoint.hf_folder)
    read, table = checkpoint_reader(checkpoint, ROLES[args.role], config), parameter_table(config)
    with Progress()("export", len(table), "tensors") as advance:
        save_hf(
            args.output,
            config,
            _tensors(table, read, advance),
            DTYPES[args.dtype],
            tokenizer,
            generation=generation_defaults(checkpoint.hf_folder),
            card=_card(checkpoint) if args.role == "policy" else None,
        )
    print(f"{args.output}: the {args.role} after step {checkpoint.step}, {len(table)} tensors, {DTYPES[args.dtype]}")


def _card(checkpoint: Checkpoint) -> str | None:
    """Make the model card of the checkpoint's run, with the step.

    None for a checkpoint without a card.
    """
    path = checkpoint.hf_folder / CARD_FILE
    return f"{path.read_text(encoding='utf-8')}\nWeights after step {checkpoint.step}.\n" if path.is_file() else None


def _tensors(
    table: tuple[ParameterSpec, ...], read: Callable[[ParameterSpec], np.ndarray], advance: Callable[[int], None]
) -> Iterator[tuple[ParameterSpec, np.ndarray]]:
    for spec in table:
        yield spec, read(spec)
        advance(1)
