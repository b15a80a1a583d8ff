"""Supervised fine-tuning from Python."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from mindrlhf.api.config import SFTConfig
from mindrlhf.api.objects import TEXT, refuse_given, text_rows
from mindrlhf.api.trainer import TRAIN, Trainer
from mindrlhf.job import Job
from mindrlhf.run.stop_signals import StopSignals
from mindrlhf.trainer.check import check_tuning
from mindrlhf.trainer.start import Steps, sft_steps

# Argument -> what would be right.
NOT_DONE = {
    "data_collator": "rows are cut into batches by train.max_tokens_per_micro_batch; leave it out",
    "compute_loss_func": "the loss is the mean over the answers' tokens; leave it out",
    "compute_metrics": "data={'val_problems': ...} measures accuracy; leave it out",
    "optimizers": "AdamW is the optimizer, set by learning_rate, lr_scheduler_type and adam_beta1",
    "optimizer_cls_and_kwargs": "AdamW is the optimizer, set by learning_rate, lr_scheduler_type and adam_beta1",
    "preprocess_logits_for_metrics": "logits are not kept; leave it out",
    "quantization_config": "weights are float32 or bfloat16 numbers here; give peft_config alone",
}


class SFTTrainer(Trainer):
    """Supervised fine-tuning of a language model, with TRL's arguments.

    model: folder in Hugging Face's format, or a hub's id; None for random weights of the shape in `sft_path_train`.
    train_dataset, eval_dataset: rows with `messages` (and `tools`), with `prompt` and `completion` as texts or
    messages, or with `text`, of which every token is trained; a `datasets.Dataset`; a JSONL, JSON or parquet file, or
    a MindRecord. processing_class: a tokenizer instead of the model's. peft_config: a `LoraConfig`, or a mapping of its
    values. formatting_func: makes a row's `text`. Under msrun every process makes the same trainer.
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
        formatting_func: Callable[[Any], str] | None = None,
        data_collator: None = None,
        compute_loss_func: None = None,
        compute_metrics: None = None,
        optimizers: tuple[None, None] = (None, None),
        optimizer_cls_and_kwargs: None = None,
        preprocess_logits_for_metrics: None = None,
        quantization_config: None = None,
    ):
        given = locals() | {"optimizers": None if tuple(optimizers) == (None, None) else optimizers}
        refuse_given("SFTTrainer", given, NOT_DONE)
        args = SFTConfig() if args is None else args
        field = args.dataset_text_field or TEXT
        train_dataset = text_rows(train_dataset, "train_dataset", field, formatting_func)
        eval_dataset = text_rows(eval_dataset, "eval_dataset", field, formatting_func)
        super().__init__(model, args, train_dataset, eval_dataset, processing_class, callbacks, peft_config)
        rows = self._datasets[TRAIN]
        if "assistant_only_loss" not in args and (isinstance(rows, str) or (rows and "messages" in rows[0])):
            self._tell("assistant_only_loss is left out: of messages only the answers are trained, not all turns")

    def _check(self, flags: Any) -> Job:
        return check_tuning(flags, self._objects())

    def _run(self, job: Job, signals: StopSignals) -> Steps:
        return sft_steps(job, signals)
