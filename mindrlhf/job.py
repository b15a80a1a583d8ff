"""GRPO run with checked settings, from which its parts are built."""

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindrlhf.configs.grpo import GRPOConfig
from mindrlhf.configs.model import ModelConfig
from mindrlhf.configs.model_yaml import ModelYaml
from mindrlhf.data.tokenizer import Tokenizer


@dataclass(frozen=True)
class Job:
    """GRPO run with checked settings; MindSpore has not been touched yet."""

    args: argparse.Namespace
    config: GRPOConfig
    train: ModelYaml
    infer: ModelYaml
    model: ModelConfig
    tokenizer: Tokenizer
    policy_path: str | None
    reference_path: str | None
    critic_path: str | None
    output: Path

    def described(self) -> dict[str, Any]:
        """All settings, for people and for comparing runs."""
        flags = {name: value for name, value in vars(self.args).items() if name not in ("overrides", "from_verl")}
        return {
            "grpo": self.config.model_dump(mode="json"),
            "train_yaml": self.train.model_dump(mode="json", exclude={"unused"}),
            "infer_yaml": self.infer.model_dump(mode="json", exclude={"unused"}),
            "model": self.model.model_dump(mode="json"),
            "flags": {name: str(value) for name, value in flags.items() if value is not None},
        }
