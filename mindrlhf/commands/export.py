"""`mindrlhf export`: a training checkpoint's model as a Hugging Face folder or GGUF file.

The checkpoint may have any layout. A checkpoint of adapters gives an adapter (a folder in PEFT's format, or a GGUF
file), or the merged model.
"""

import argparse
from dataclasses import replace
from pathlib import Path

from mindrlhf.checkpoint.hf import CARD_FILE, generation_defaults, read_hf_config, save_hf
from mindrlhf.checkpoint.local import local_models
from mindrlhf.checkpoint.model_card import adapter_card, read_card
from mindrlhf.checkpoint.peft import StoredAdapter, write_adapter
from mindrlhf.checkpoint.resume import Checkpoint, newest
from mindrlhf.checkpoint.weights import Weights, checkpoint_reader
from mindrlhf.commands.convert import DTYPES
from mindrlhf.configs.model import ModelConfig
from mindrlhf.data.tokenizer import Tokenizer
from mindrlhf.errors import UserError
from mindrlhf.metrics.progress import Progress, counted
from mindrlhf.model_roles import POLICY, ROLES, SAVED
from mindrlhf.models.families import FAMILIES
from mindrlhf.models.parameters import parameter_table

TYPES = ("f16", "bf16", "f32", "q8_0", "q4_0")  # of GGUF files
LEAST_PUBLISHED = 30_000  # tokens; the vocabularies of published models have more
KINDS = {role.name: role.checkpoint for role in sorted(SAVED, key=lambda role: role.training is None)}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    checkpoint = "step_N folder, latest, best, or a folder of checkpoints; with --gguf any model"
    add("--checkpoint", required=True, type=Path, help=checkpoint)
    add("--output", type=Path, help="Hugging Face folder to write")
    add("--dtype", choices=DTYPES, help="how numbers are stored in it (default fp32)")
    add("--gguf", type=Path, help="GGUF file to write, for llama.cpp and ollama, with a Modelfile beside it")
    add("--type", choices=TYPES, help="how the numbers of matrices are stored in it (default f16)")
    add("--merge", action="store_true", help="of a run with adapters: the merged model (default: the adapter)")
    add("--base", help="base model of the adapters (default: the path that the run had it at)")
    add("--role", choices=KINDS, default=POLICY.name, help="whose weights (default policy)")


def run(args: argparse.Namespace) -> None:
    """Check the checkpoint, then write one tensor at a time.

    The folder appears complete or not at all.
    """
    _check_outputs(args)
    args = local_models(args)
    if args.gguf is not None:
        from mindrlhf.commands.export_gguf import export_gguf  # it imports `gguf`

        export_gguf(args)
        return
    dtype = DTYPES[args.dtype or "fp32"]
    checkpoint = newest(args.checkpoint)
    config = read_hf_config(checkpoint.hf_folder, seeing=True)
    config = config.as_critic() if ROLES[args.role].value_head else config
    first, stored = Weights(str(checkpoint.folder), config, 0).split() if args.role == "policy" else (None, None)
    if stored is None and (args.merge or args.base):
        raise UserError(f"{checkpoint.folder}: holds whole weights of the {args.role}; leave out --merge and --base.")
    if stored is not None and not args.merge:
        _write_adapter(args, checkpoint, stored, config)
        return
    tokenizer = Tokenizer.from_path(checkpoint.hf_folder)
    if stored is None:
        read = checkpoint_reader(checkpoint, KINDS[args.role], config)
    else:
        read = replace(first, path=args.base or first.path).merged(stored)
    table = parameter_table(config)
    with Progress()("export", len(table), "tensors") as advance:
        tensors = counted(((spec, read(spec)) for spec in table), advance)
        generation = generation_defaults(checkpoint.hf_folder)
        card = _card(checkpoint) if args.role == "policy" else None
        save_hf(args.output, config, tensors, dtype, tokenizer, generation=generation, card=card)
    print(f"{args.output}: the {args.role} after step {checkpoint.step}, {len(table)} tensors, {dtype}")
    if note := foreign(tokenizer):
        print(f"{args.output}: {note}")


def _check_outputs(args: argparse.Namespace) -> None:
    """Check that one output is named, with its own flags."""
    if (args.output is None) == (args.gguf is None):
        raise UserError("give either --output, the Hugging Face folder to write, or --gguf, the GGUF file.")
    for flag, output in (("dtype", "output"), ("type", "gguf")):
        if getattr(args, flag) is not None and getattr(args, output) is None:
            raise UserError(f"--{flag} is about --{output}, which is not given; leave it out.")


def foreign(tokenizer: Tokenizer) -> str:
    """Describe what llama.cpp and ollama miss in a tokenizer; empty if nothing."""
    own = f"its own vocabulary of {tokenizer.size} tokens, which llama.cpp's converter refuses, and --gguf writes"
    faults = {own: tokenizer.size < LEAST_PUBLISHED, "no chat template": tokenizer.chat_template is None}
    found = " and ".join(fault for fault, holds in faults.items() if holds)
    return f"not for llama.cpp or ollama as it is: the tokenizer has {found}" if found else ""


def _write_adapter(
    args: argparse.Namespace, checkpoint: Checkpoint, stored: StoredAdapter, config: ModelConfig
) -> None:
    """Write the adapter in PEFT's format."""
    card = _card(checkpoint)
    base = replace(stored.base, name=args.base or stored.base.name)
    in_memory = FAMILIES[config.family].in_memory
    write_adapter(args.output, stored.adapter, stored.arrays, base, adapter_card(card), in_memory=in_memory)
    print(f"{args.output}: the adapter after step {checkpoint.step}, {len(stored.arrays)} tensors, of {base.name}")


def _card(checkpoint: Checkpoint) -> dict[str, bytes]:
    """Make the model card of the checkpoint's run, with the step.

    {} for a checkpoint without a card.
    """
    card = read_card(checkpoint.hf_folder)
    line = f"\nWeights after step {checkpoint.step}.\n"
    return {name: content + line.encode() if name == CARD_FILE else content for name, content in card.items()}
