"""The model that every run starts from: practice problems, a tokenizer, and a short fine-tuning on careless answers."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindrlhf.errors import UserError
from mindrlhf.files.atomic import make_folder

TASK = "arithmetic"
REWARD = "gsm8k"
SPLITS = ("demonstrations", "train", "test")
WRITTEN = "start.json"

# Runs round alike on any number of cores: products cut among threads have other last bits.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "GLOG_v": "3"}


@dataclass(frozen=True)
class StartModel:
    """Folder of the start model."""

    folder: Path

    @property
    def ready(self) -> bool:
        return (self.folder / WRITTEN).is_file()

    @property
    def held_out(self) -> str:
        """Setting of the held-out problems."""
        return f"data.val_dataset={self.folder / 'test.mindrecord'}"

    def flags(self) -> list[str]:
        """Flags of `mindrlhf train` for a run that starts here."""
        flags = {
            "sft_path_train": self.folder / "model.yaml",
            "load_sft_checkpoint_infer": self.folder / "warm_up" / "hf",
            "mind_dataset_dir": self.folder / "train.mindrecord",
            "enable_compile_cache": True,
        }
        return [part for name, value in flags.items() for part in (f"--{name}", str(value))]

    def make(self, start: Mapping[str, Any], log: Path) -> None:
        """Make it as the records say, once; its commands write to `log`. Raises UserError if one fails."""
        if self.ready:
            return
        make_folder(self.folder)
        shape = {"type": "LlamaConfig", "compute_dtype": "float32", **start["shape"]}
        context = {"device_target": "CPU"}
        yaml = {"model": {"model_config": shape}, "context": context}
        (self.folder / "model.yaml").write_text(json.dumps(yaml, indent=1))
        tokenizer = ["--vocab_path", f"{self.folder}/vocab.json", "--merges_file_path", f"{self.folder}/merges.txt"]
        command(["synthesize", "--task", TASK, *start["problems"], "--output_dir", str(self.folder)], log)
        for split in SPLITS:
            rows = self.folder / split
            files = ["--file_path", f"{rows}.jsonl", "--output_path", f"{rows}.mindrecord"]
            command(["data", *tokenizer, "--dataset_type", TASK, "--template", "plain", *files], log)
        warm_up = str(self.folder / "warm_up")
        outputs = ["--save_ckpt_dir", warm_up, "--output_dir", warm_up]
        given = ["--mind_dataset_dir", f"{self.folder}/demonstrations.mindrecord", "--enable_compile_cache", "True"]
        yamls = ["--sft_path_train", f"{self.folder}/model.yaml"]
        command(["sft", *tokenizer, *yamls, *given, *outputs, *start["warm_up"]], log)
        (self.folder / WRITTEN).write_text(json.dumps(start, indent=1))


def command(arguments: Sequence[str], log: Path) -> None:
    """Run a `mindrlhf` command, whose output goes to the end of `log`. Raises UserError if it fails."""
    with log.open("a") as file:
        program = [sys.executable, "-m", "mindrlhf", *arguments]
        done = subprocess.run(program, stdout=file, stderr=subprocess.STDOUT, env=os.environ | ENVIRONMENT)
    if done.returncode:
        raise UserError(f"mindrlhf {arguments[0]} ended with exit code {done.returncode}; {log} says why.")
