"""Typed settings of supervised fine-tuning (`mindrlhf sft`): the warm start before GRPO."""

from pydantic import Field

from mindrlhf.configs.base import Settings
from mindrlhf.configs.grpo import OptimizerSettings, Seed, TrainSettings
from mindrlhf.configs.lora import LoraSettings
from mindrlhf.configs.tracking import RunSettings


class SFTDataSettings(Settings):
    """Selection of a step's pairs."""

    pairs_per_step: int = Field(32, ge=1)
    """Pairs, or conversations, of one update over all data-parallel ranks (verl data.train_batch_size)."""
    shuffle: bool = True
    """Draw pairs in a new order each epoch."""
    tool_format: str = "hermes"
    """Form of tool calls in conversations: hermes, retool, python_block, or file.py:Class."""
    max_length: int | None = Field(None, ge=2)
    """Tokens of a prompt with its response; longer responses lose their end (verl data.max_length, TRL max_length)."""


class SFTConfig(Settings):
    """All settings of a supervised fine-tuning run."""

    seed: Seed = 0
    """Seed of everything random in the run."""
    data: SFTDataSettings = SFTDataSettings()
    optimizer: OptimizerSettings = OptimizerSettings(lr=1e-5)
    lora: LoraSettings = LoraSettings()
    train: TrainSettings = TrainSettings()
    trainer: RunSettings = RunSettings()
