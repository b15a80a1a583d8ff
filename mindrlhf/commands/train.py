"""`mindrlhf train`: GRPO, with the flags that MindRLHF's users know."""

import argparse
from pathlib import Path

from mindrlhf.configs.yaml_file import PREFIX, preset_names
from mindrlhf.files.naming import DEFAULT_FOLDER
from mindrlhf.run.stop_signals import StopSignals


def boolean(text: str) -> bool:
    """Parse True or False, as MindRLHF's flags are written."""
    word = text.strip().lower()
    if word not in ("true", "1", "yes", "on", "false", "0", "no", "off"):
        raise argparse.ArgumentTypeError(f"{text!r} is neither True nor False")
    return word in ("true", "1", "yes", "on")


BOOLEAN = {"type": boolean, "metavar": "True|False"}


def add_model_arguments(parser: argparse._ActionsContainer) -> None:
    """Declare the flags that all commands with a tokenizer have."""
    add = parser.add_argument
    add("--vocab_path", help="vocab.json of a Qwen2 tokenizer")
    add("--merges_file_path", help="merges.txt of a Qwen2 tokenizer")
    add("--tokenizer_path", help="instead of the two: an HF directory, tokenizer.json or tokenizer.model")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    presets = ", ".join(f"{PREFIX}{name}" for name in preset_names())
    settings = "settings over --grpo_config; with the prefix train_yaml. or infer_yaml. they go to the model YAML"
    add("overrides", nargs="*", metavar="group.key=value", help=settings)
    add("--sft_path_infer", required=True, help="model YAML of the generating graph (a MindFormers predict YAML)")
    add("--sft_path_train", required=True, help="model YAML of the training graph (a MindFormers finetune YAML)")
    add_model_arguments(parser)
    add("--mind_dataset_dir", help="prompt MindRecord")
    add("--grpo_config", help=f"YAML of GRPO settings, or one of {presets}")
    verl = "a verl command line, or YAML files of its keys: settings over --grpo_config, with a report on each key"
    add("--from-verl", "--from_verl", metavar="'KEY=VALUE ...'", help=verl)
    outputs = "metrics, TensorBoard events, rollouts (default: the folder of --save_ckpt_dir)"
    add("--output_dir", type=Path, help=outputs)
    saved = "checkpoints, and the trained model as an HF directory"
    add("--save_ckpt_dir", type=Path, default=DEFAULT_FOLDER, help=saved)
    add("--save_data_file", type=Path, help="MindRecord of all rollouts with their rewards")
    add("--load_sft_checkpoint_infer", help="weights; an HF directory, safetensors or .ckpt")
    add("--load_sft_checkpoint_train", help="default: those of --load_sft_checkpoint_infer")
    add("--load_ref_checkpoint", help="reference weights; default: those of training")
    add("--load_critic_checkpoint", help="PPO's critic: one that a run has saved, or any model; default: as training")
    resumed = "auto or True: from the newest whole checkpoint of --save_ckpt_dir; a step_N folder; never or False"
    add("--resume_training", metavar="auto|PATH|never", help=f"{resumed} (default: trainer.resume_mode)")
    add("--use_parallel", **BOOLEAN, help="expect to be started by msrun")
    cache = "keep compiled graphs in ~/.cache/mindrlhf/graphs for runs of the same model, settings and shapes"
    add("--enable_compile_cache", **BOOLEAN, default=False, help=f"{cache} (default: False)")
    add("--only_save_strategy", **BOOLEAN, default=False)
    add("--replay", type=Path, help="train on a file of --save_data_file instead of generating")
    # MindRLHF's two flags of its warm-up rollout; there is none here, and a command line that has them still works.
    add("--pre_num_generations", type=int, help=argparse.SUPPRESS)
    add("--pre_store_data", type=int, help=argparse.SUPPRESS)


def run(args: argparse.Namespace) -> None:
    with StopSignals() as signals:
        from mindrlhf.trainer.start import run_grpo  # imports NumPy, whose threads must not take the signals

        run_grpo(args, signals)
