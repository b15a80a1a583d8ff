"""Rules for the keys of TRL's `SFTConfig` that are not just renamed settings."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from mindrlhf.configs.sft import SFTSettings
from mindrlhf.migration.trl.names import DEFAULTS
from mindrlhf.migration.trl.rules import RunRules
from mindrlhf.migration.trl.translation import RunSizes, TRLTranslation

PAIRS = "data.pairs_per_step"
BATCH = ("per_device_train_batch_size", "gradient_accumulation_steps")


def translate_sft(
    given: Mapping[str, Any], base: SFTSettings, own: Collection[str], around: RunSizes, where: str = "SFTConfig"
) -> TRLTranslation:
    """Translate the keys of an `SFTConfig`.

    base: the settings that the keys override. own: dotted settings that the user gave under our names. Raises UserError
    for a key that is not TRL's, and for a value that is not supported here.
    """
    return _SFT(given, where=where, settings=SFTSettings, base=base, own=own, around=around).applied()


@dataclass
class _SFT(RunRules):
    """Rules of fine-tuning's own keys."""

    rules = ("batch", "order", "loss", "length", "schedule", "evaluation", "saving", "outputs")
    measured = ("eval_loss",)

    def batch(self) -> None:
        """Count pairs of a step: TRL counts pairs of one device and micro-batch."""
        size, accumulation = (self(key) for key in BATCH)
        named = [key for key in BATCH if self.peek(key) is not None]
        if PAIRS in self.own:
            if named:
                raise self.refuse(named[0], f"and {PAIRS} is given; leave one of them out")
            self.rows = self.base.data.pairs_per_step
        elif self.around.devices is not None:
            self.rows = (size or DEFAULTS[BATCH[0]]) * (accumulation or 1) * self.around.devices
            self.put(PAIRS, self.rows, BATCH[0])

    def order(self) -> None:
        """Choose the order of rows, which is the sampler's alone."""
        if self("train_sampling_strategy") == "sequential":
            self.put("data.shuffle", False, "train_sampling_strategy")
        if self("shuffle_dataset") is not None:
            self.needless["shuffle_dataset"] = "train_sampling_strategy decides the order"

    def loss(self) -> None:
        """Refuse another loss than the mean over tokens."""
        self("dataset_text_field")  # the trainer reads it
        if self("loss_type", "nll") != "nll":
            raise self.refuse("loss_type", "which is not done here; set it to nll")
