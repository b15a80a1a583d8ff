"""`mindrlhf train`: GRPO, with the flags that MindRLHF's users know."""

import argparse
from pathlib import Path

from mindrlhf.commands.arguments import BOOLEAN
from mindrlhf.files.shipped import shipped_yamls
from mindrlhf.flags import TrainFlags
from mindrlhf.run.stop_signals import StopSignals


def add_model_arguments(parser: argparse._ActionsContainer) -> None:
    """Declare the flags that all commands with a tokenizer have."""
    add = parser.add_argument
    add("--vocab_path", help="vocab.json of a Qwen2 tokenizer")
    add("--merges_file_path", help="merges.txt of a Qwen2 tokenizer")
    add("--tokenizer_path", help="instead of the two: an HF directory or a hub's id, tokenizer.json or tokenizer.model")


def add_device_argument(parser: argparse._ActionsContainer) -> None:
    """Declare the flag of the device."""
    add = parser.add_argument
    default = "the model YAML's, else Ascend where there is an NPU, else CPU"
    add("--device", "--device_target", dest="device_target", metavar="CPU|Ascend", help=f"default: {default}")


def add_training_yaml_arguments(parser: argparse._ActionsContainer) -> None:
    """Declare the flags of the training graph's model YAML and of its values."""
    add = parser.add_argument
    default = "default: the checkpoint's config.json and the flags of the layout"
    finetune = "model YAML of the training graph, a MindFormers finetune YAML or the name of a shipped one"
    add("--sft_path_train", help=f"{finetune} ({default})")
    parallel = "parallel_config of training, over the model YAML:"
    add("--tensor_parallel", type=int, metavar="N", help=f"{parallel} model_parallel (default 1)")
    add("--pipeline_parallel", type=int, metavar="N", help=f"{parallel} pipeline_stage (default 1)")
    add("--data_parallel", type=int, metavar="N", help=f"{parallel} data_parallel (default: all other processes)")
    add("--sequence_parallel", action="store_true", default=None, help=f"{parallel} use_seq_parallel")
    add_device_argument(parser)


def add_run_arguments(parser: argparse._ActionsContainer) -> None:
    """Declare the flags of resuming and of kept graphs."""
    add = parser.add_argument
    resumed = "auto or True: from the newest whole checkpoint of --save_ckpt_dir; a step_N folder; never or False"
    add("--resume_training", metavar="auto|PATH|never", help=f"{resumed} (default: trainer.resume_mode)")
    cache = "keep compiled graphs in ~/.cache/mindrlhf/graphs for runs of the same model, settings and shapes"
    add("--enable_compile_cache", **BOOLEAN, default=False, help=f"{cache} (default: False)")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    presets = ", ".join(name for name in shipped_yamls() if ":" in name)
    settings = "settings over --grpo_config; with the prefix train_yaml. or infer_yaml. they go to the model YAML"
    add("overrides", nargs="*", metavar="group.key=value", help=settings)
    add_training_yaml_arguments(parser)
    predict = "model YAML of the generating graph, a predict YAML likewise (default: as --sft_path_train's)"
    add("--sft_path_infer", help=predict)
    split = "parallel_config.model_parallel of generation; its other ranks are data-parallel"
    add("--infer_tensor_parallel", type=int, metavar="N", help=f"{split} (default: --tensor_parallel)")
    apart = "of the processes, on which nothing else runs (trainer.placement=split)"
    add("--trainer_ranks", type=int, metavar="N", help=f"train on the first N {apart}")
    add("--generator_ranks", type=int, metavar="N", help=f"generate on the next N {apart}")
    others = f"run reference, teacher and critic on the last N {apart}; score_yaml. has their layout"
    add("--scorer_ranks", type=int, metavar="N", help=others)
    add_model_arguments(parser)
    add("--mind_dataset_dir", help="prompt MindRecord; or rows as `mindrlhf data` reads them, a hub's dataset too")
    add("--grpo_config", help=f"YAML of GRPO settings, or one of {presets}")
    verl = "a verl command line, or YAML files of its keys: settings over --grpo_config, with a report on each key"
    add("--from-verl", "--from_verl", metavar="'KEY=VALUE ...'", help=verl)
    outputs = "metrics, TensorBoard events, rollouts (default: the folder of --save_ckpt_dir)"
    add("--output_dir", type=Path, help=outputs)
    saved = "checkpoints, and the trained model as an HF directory"
    add("--save_ckpt_dir", type=Path, default=TrainFlags.save_ckpt_dir, help=saved)
    add("--save_data_file", type=Path, help="MindRecord of all rollouts with their rewards")
    add("--load_sft_checkpoint_infer", help="weights; an HF directory, a hub's id, a GGUF file, safetensors or .ckpt")
    add("--load_sft_checkpoint_train", help="default: those of --load_sft_checkpoint_infer")
    add("--load_ref_checkpoint", help="reference weights; default: those of training")
    add("--load_critic_checkpoint", help="PPO's critic: one that a run has saved, or any model; default: as training")
    add("--use_parallel", **BOOLEAN, help="expect to be started by msrun")
    add_run_arguments(parser)
    add("--only_save_strategy", **BOOLEAN, default=False)
    add("--replay", type=Path, help="train on a file of --save_data_file instead of generating")
    # MindRLHF's two flags of its warm-up rollout: there is none here, but command lines with these flags still work.
    add("--pre_num_generations", type=int, help=argparse.SUPPRESS)
    add("--pre_store_data", type=int, help=argparse.SUPPRESS)


def run(args: argparse.Namespace) -> None:
    with StopSignals() as signals:
        from mindrlhf.trainer.start import run_grpo  # imports NumPy, whose threads must not take the signals

        run_grpo(TrainFlags.of(args), signals)
