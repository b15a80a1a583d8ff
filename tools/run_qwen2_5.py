"""Fine-tuning and prediction under the name and flags of MindFormers' script: `mindrlhf sft` and `mindrlhf generate`.

python run_qwen2_5.py --config finetune_qwen2_5_7b.yaml --run_mode finetune --train_data pairs.mindrecord
python run_qwen2_5.py --run_mode predict --load_checkpoint Qwen2.5-7B --predict_data "A question"

Further arguments go to the command as they are.
"""

import argparse
import sys

from mindrlhf.cli import run

# Run mode -> command, and MindFormers' flag -> the command's.
COMMANDS = {
    "finetune": (
        "sft",
        {
            "config": "sft_path_train",
            "train_data": "mind_dataset_dir",
            "load_checkpoint": "load_sft_checkpoint_train",
            "output_dir": "save_ckpt_dir",
        },
    ),
    "predict": ("generate", {"load_checkpoint": "model", "predict_data": "prompt"}),
}


def command_line(words: list[str]) -> list[str]:
    """Translate MindFormers' flags to a command of `mindrlhf`."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--run_mode", required=True, choices=COMMANDS)
    for name in ("config", "train_data", "load_checkpoint", "output_dir", "predict_data"):
        parser.add_argument(f"--{name}")
    given, others = parser.parse_known_args(words)
    command, names = COMMANDS[given.run_mode]
    flags = [(ours, getattr(given, theirs)) for theirs, ours in names.items()]
    return [command, *(word for name, value in flags if value for word in (f"--{name}", value)), *others]


if __name__ == "__main__":
    run(*command_line(sys.argv[1:]))
