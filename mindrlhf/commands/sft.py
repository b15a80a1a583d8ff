"""`mindrlhf sft`: supervised fine-tuning, the warm start before GRPO."""

import argparse
from pathlib import Path

from mindrlhf.commands.train import (
    add_model_arguments,
    add_run_arguments,
    add_training_yaml_arguments,
)
from mindrlhf.flags import SFTFlags
from mindrlhf.run.stop_signals import StopSignals


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    settings = "settings over --sft_config; train_yaml.group.key=value goes to the model YAML"
    add("overrides", nargs="*", metavar="group.key=value", help=settings)
    add_training_yaml_arguments(parser)
    add_model_arguments(parser)
    dataset = (
        "MindRecord with prompts and answers; or JSONL, JSON, parquet or a hub's dataset with messages (and tools)"
    )
    add("--mind_dataset_dir", required=True, help=dataset)
    add("--sft_config", help="YAML of fine-tuning settings")
    add(
        "--load_sft_checkpoint_train",
        help="weights to start from: a folder or a hub's id (default: random from the seed)",
    )
    saved = "checkpoints; the trained model goes to its subfolder hf"
    add("--save_ckpt_dir", type=Path, default=SFTFlags.save_ckpt_dir, help=saved)
    add("--output_dir", type=Path, help="metrics and TensorBoard (default: the folder of --save_ckpt_dir)")
    add_run_arguments(parser)


def run(args: argparse.Namespace) -> None:
    with StopSignals() as signals:
        from mindrlhf.trainer.start import run_sft  # imports NumPy, whose threads must not take the signals

        run_sft(SFTFlags.of(args), signals)
