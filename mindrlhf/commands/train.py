"""`mindrlhf train`: GRPO, with the flags that MindRLHF's users know."""

import argparse
from pathlib import Path

from mindrlhf.configs.yaml_file import PREFIX, preset_names
from mindrlhf.files.naming import DEFAULT_FOLDER
from mindrlhf.run.stop_signals import StopSignals


def boolean(text: str) -> bool:
    """Parse True or False, as MindRLHF's flags are written."""
    lowered = text.strip().lower()
    if lowered in ("true", "1", "yes", "on"):
        return True
    if lowered in ("false", "0", "no", "off"):
        return False
    raise argparse.ArgumentTypeError(f"{text!r} is neither True nor False")


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags that all commands with a tokenizer have."""
    parser.add_argument("--vocab_path", help="vocab.json of a Qwen2 tokenizer")
    parser.add_argument("--merges_file_path", help="merges.txt of a Qwen2 tokenizer")
    parser.add_argument(
        "--tokenizer_path", help="instead of the two: an HF directory, tokenizer.json or tokenizer.model"
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    presets = [f"{PREFIX}{name}" for name in preset_names()]
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="group.key=value",
        help="settings over --grpo_config; with the prefix train_yaml. or infer_yaml. they go to the model YAML",
    )
    parser.add_argument(
        "--sft_path_infer", required=True, help="model YAML of the generating graph (a MindFormers predict YAML)"
    )
    parser.add_argument(
        "--sft_path_train", required=True, help="model YAML of the training graph (a MindFormers finetune YAML)"
    )
    add_model_arguments(parser)
    parser.add_argument("--mind_dataset_dir", help="prompt MindRecord")
    parser.add_argument("--grpo_config", help=f"YAML of GRPO settings, or one of {', '.join(presets)}")
    parser.add_argument(
        "--from-verl",
        "--from_verl",
        metavar="'KEY=VALUE ...'",
        help="a verl command line, or YAML files of its keys: the settings go over --grpo_config, a report says what "
        "became of each key, and one that asks for what is not done here is refused",
    )
    _add_outputs(parser)
    _add_checkpoints(parser)
    parser.add_argument(
        "--use_parallel", type=boolean, default=None, metavar="True|False", help="expect to be started by msrun"
    )
    parser.add_argument(
        "--enable_compile_cache",
        type=boolean,
        default=False,
        metavar="True|False",
        help="keep compiled graphs in ~/.cache/mindrlhf/graphs, from where the next run with the same model, settings "
        "and shapes takes them (default: False)",
    )
    parser.add_argument("--only_save_strategy", type=boolean, default=False, metavar="True|False")
    parser.add_argument("--replay", type=Path, help="train on a file of --save_data_file instead of generating")
    # MindRLHF's two flags of its warm-up rollout; there is none here, and a command line that has them still works.
    parser.add_argument("--pre_num_generations", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--pre_store_data", type=int, help=argparse.SUPPRESS)


def _add_outputs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--output_dir", type=Path, help="metrics, TensorBoard events, rollouts (default: the folder of --save_ckpt_dir)"
    )
    parser.add_argument(
        "--save_ckpt_dir",
        type=Path,
        default=DEFAULT_FOLDER,
        help="checkpoints, and the trained model as an HF directory",
    )
    parser.add_argument("--save_data_file", type=Path, help="MindRecord of all rollouts with their rewards")


def _add_checkpoints(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--load_sft_checkpoint_infer", help="weights; an HF directory, safetensors or .ckpt")
    parser.add_argument("--load_sft_checkpoint_train", help="default: those of --load_sft_checkpoint_infer")
    parser.add_argument("--load_ref_checkpoint", help="reference weights; default: those of training")
    parser.add_argument(
        "--load_critic_checkpoint", help="PPO's critic: one that a run has saved, or any model; default: as training"
    )
    parser.add_argument(
        "--resume_training",
        metavar="auto|PATH|never",
        help="continue from the newest whole checkpoint of --save_ckpt_dir (auto or True), or from a step_N folder; "
        "never or False begins a new run (default: trainer.resume_mode)",
    )


def run(args: argparse.Namespace) -> None:
    with StopSignals() as signals:
        from mindrlhf.trainer.start import run_grpo  # imports NumPy, whose threads must not take the signals

        run_grpo(args, signals)
