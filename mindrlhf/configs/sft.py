"""Typed settings of supervised fine-tuning (`mindrlhf sft`): the warm start before GRPO."""

from pydantic import Field

from mindrlhf.configs.base import Settings
from mindrlhf.configs.grpo import MAX_SEED, OptimizerSettings, TrainSettings
from mindrlhf.configs.lora import LoraSettings
from mindrlhf.configs.tracking import TrackingSettings


class SFTDataSettings(Settings):
    """Selection of a step's pairs."""

    pairs_per_step: int = Field(32, ge=1)
    """Pairs of one update over all data-parallel ranks (verl data.train_batch_size)."""
    shuffle: bool = True
    """Draw pairs in a new order each epoch."""


class SFTTrainerSettings(TrackingSettings):
    """Length of a run, and its outputs."""

    total_steps: int | None = Field(None, ge=1)
    """Updates of the run; null is epochs x (rows / pairs_per_step) (TRL max_steps)."""
    epochs: int = Field(1, ge=1)
    """Passes over the pairs when total_steps is not given (TRL num_train_epochs)."""
    progress: bool = True
    """Show progress bars on a terminal."""


class SFTConfig(Settings):
    """All settings of a supervised fine-tuning run."""

    seed: int = Field(0, ge=0, le=MAX_SEED)
    """Seed of everything random in the run."""
    data: SFTDataSettings = SFTDataSettings()
    """Which pairs a step takes."""
    optimizer: OptimizerSettings = OptimizerSettings(lr=1e-5)
    """AdamW, its schedule and gradient clipping."""
    lora: LoraSettings = LoraSettings()
    """Low-rank adapters that train in place of the weights."""
    train: TrainSettings = TrainSettings()
    """How an update is cut into micro-batches."""
    trainer: SFTTrainerSettings = SFTTrainerSettings()
    """How long to run and what to write."""
