"""Typed settings of supervised fine-tuning (`mindrlhf sft`): the warm start before GRPO."""

from typing import Any, ClassVar, Literal

from pydantic import Field

from mindrlhf.configs.base import Float32, Settings
from mindrlhf.configs.grpo import (
    AccuracySettings,
    HeldOut,
    MemorySettings,
    OptimizerSettings,
    RewardSettings,
    Seed,
    TrainSettings,
)
from mindrlhf.configs.lora import LoraSettings
from mindrlhf.configs.run import RunSettings


class SFTDataSettings(Settings):
    """Selection of a step's pairs, and of held-out data."""

    pairs_per_step: int = Field(32, ge=1)
    """Pairs, or conversations, of one update over all data-parallel ranks (verl data.train_batch_size)."""
    shuffle: bool = True
    """Draw pairs in a new order each epoch (TRL train_sampling_strategy)."""
    tool_format: str = "hermes"
    """Format of tool calls in conversations: hermes, retool, python_block, or file.py:Class."""
    chat_template_kwargs: dict[str, Any] = {}
    """Additional variables of the chat template; `chat_template` chooses one by name (TRL chat_template_kwargs)."""
    max_length: int | None = Field(None, ge=2)
    """Maximum tokens of prompt and response; long responses lose their end (verl data.max_length, TRL max_length)."""
    val_dataset: str | None = None
    """Held-out demonstrations in a form of --mind_dataset_dir, whose loss is measured (verl data.val_files, TRL
    eval_dataset)."""
    val_share: Float32 = Field(0.0, ge=0.0, lt=1.0)
    """Share of the rows that is held out to measure the loss, drawn by the seed."""
    val_problems: str | None = None
    """Prompt MindRecord of held-out problems, whose accuracy is measured too."""


class SFTValidationSettings(AccuracySettings):
    """Generation and scoring for held-out problems (`data.val_problems`)."""

    max_slots: int = Field(64, ge=1)
    """Sequences decoded at once on one data-parallel rank."""


class SFTRunSettings(RunSettings):
    """Length of a run, its measurements, checkpoints and outputs."""

    save_best_metric: str | None = None
    """Metric whose best step gets a checkpoint that is kept; null is the smallest val/loss if early_stop_patience or
    export_best is set, else none (TRL metric_for_best_model)."""

    @property
    def best(self) -> tuple[str | None, Literal["max", "min"]]:
        if self.save_best_metric is None and (self.early_stop_patience or self.export_best):
            return "val/loss", "min"
        return super().best


class SFTSettings(Settings):
    """All settings of a supervised fine-tuning run."""

    kind: ClassVar[str] = "sft"
    memory: ClassVar[MemorySettings] = MemorySettings()  # everything stays in memory

    seed: Seed = 0
    """Seed of everything random in the run (TRL seed)."""
    data: SFTDataSettings = SFTDataSettings()
    validation: SFTValidationSettings = SFTValidationSettings()
    optimizer: OptimizerSettings = OptimizerSettings(lr=1e-5)
    lora: LoraSettings = LoraSettings()
    train: TrainSettings = TrainSettings()
    trainer: SFTRunSettings = SFTRunSettings()

    @property
    def held_out(self) -> HeldOut:
        """Settings of answers to `data.val_problems`."""
        return HeldOut(self.data.val_problems, self.validation, RewardSettings(), self.validation.max_slots)
