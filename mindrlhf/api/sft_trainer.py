"""Supervised fine-tuning from Python."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mindrlhf.api.config import SFTConfig
from mindrlhf.api.trainer import Trainer
from mindrlhf.job import Job
from mindrlhf.run.stop_signals import StopSignals
from mindrlhf.trainer.check import check_tuning
from mindrlhf.trainer.start import Steps, sft_steps


class SFTTrainer(Trainer):
    """Supervised fine-tuning of a language model, with TRL's arguments.

    model: folder in Hugging Face's format, or a hub's id; None for random weights of the shape in `sft_path_train`.
    train_dataset, eval_dataset: rows with `messages` (and `tools`), or with `prompt` and `completion` as texts or
    messages; a `datasets.Dataset`; a JSONL, JSON or parquet file, or a MindRecord. processing_class: a tokenizer
    instead of the model's. peft_config: a `LoraConfig`, or a mapping of its values. Under msrun every process makes the
    same trainer.
    """

    args: SFTConfig
    loss = "train/loss"
    sampling = "validation"

    def __init__(
        self,
        model: str | Path | None,
        args: SFTConfig | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        callbacks: Iterable[Any] | None = None,
        peft_config: Any = None,
    ):
        args = SFTConfig() if args is None else args
        super().__init__(model, args, train_dataset, eval_dataset, processing_class, callbacks, peft_config)

    def _check(self, flags: Any) -> Job:
        return check_tuning(flags, self._objects())

    def _run(self, job: Job, signals: StopSignals) -> Steps:
        return sft_steps(job, signals)
