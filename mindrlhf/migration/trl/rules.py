"""Rules for keys of transformers' `TrainingArguments` that are not just renamed settings."""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from mindrlhf.migration.trl.names import DEFAULTS, METRICS
from mindrlhf.migration.trl.translation import RunSizes, TRLTranslation

ALWAYS = ("console", "jsonl")  # writers of every run
SCHEDULES = {"constant": "constant", "constant_with_warmup": "constant", "linear": "linear", "cosine": "cosine"}
SCHEDULES |= dict.fromkeys(("cosine_with_min_lr", "cosine_warmup_with_min_lr"), "cosine")


@dataclass(kw_only=True)
class RunRules(TRLTranslation):
    """Rules with the numbers that several of them need.

    rules: names of the methods, in order. measured: names of measurements on held-out data, `eval_...`. base: the
    settings that the keys override. own: dotted settings that the user gave under our names. updates: optimizer updates
    of one of our steps; TRL's step is one update. rows: number of rows of one of our steps, None until it is known.
    """

    rules: ClassVar[Sequence[str]]
    measured: ClassVar[Collection[str]] = ()
    base: Any = None
    own: Collection[str] = ()
    around: RunSizes = field(default_factory=RunSizes)
    updates: int = 1
    rows: int | None = None

    def applied(self) -> "RunRules":
        """Apply the rules, then sort the other keys."""
        for rule in self.rules:
            getattr(self, rule)()
        self.place_others()
        return self

    def length(self) -> None:
        """Set the run's length."""
        most = self("max_steps")
        epochs = self("num_train_epochs")
        if most is not None and most > 0:
            self.put("trainer.total_steps", self._steps("max_steps", most), "max_steps")
        elif epochs and epochs % 1 and (steps := self._shared("num_train_epochs", epochs, self._epoch())):
            self.put("trainer.total_steps", steps, "num_train_epochs")
        if epochs is not None and not epochs % 1:
            self.put("trainer.epochs", int(epochs), "num_train_epochs")

    def schedule(self) -> None:
        """Set optimizer, warm-up and decay of the learning rate."""
        kind = self("lr_scheduler_type")
        numbers = self("lr_scheduler_kwargs", {})
        name = self("optim")
        if kind is not None:
            if kind not in SCHEDULES:
                right = f"set it to one of {', '.join(SCHEDULES)}"
                raise self.refuse("lr_scheduler_type", f"which is not done here; {right}")
            self.put("optimizer.lr_decay", SCHEDULES[kind], "lr_scheduler_type")
        if unknown := numbers.keys() - {"min_lr", "min_lr_rate"}:
            raise self.refuse("lr_scheduler_kwargs", f"and {min(unknown)} is not done here; give min_lr or min_lr_rate")
        rate = self.peek("learning_rate", self.base.optimizer.lr)
        for key, factor in {"min_lr": 1.0, "min_lr_rate": rate}.items():
            if key in numbers:
                self.put("optimizer.min_lr", factor * numbers[key], "lr_scheduler_kwargs")
        if name is not None and ("adamw" not in name or "schedule_free" in name or "4bit" in name):
            raise self.refuse("optim", "and AdamW is the only optimizer here; set it to adamw_torch or adamw_8bit")
        if name is not None and "8bit" in name:
            self.put("optimizer.state", "int8", "optim")
        steps = self("warmup_steps", 0)
        share = self("warmup_ratio", 0.0)
        if steps >= 1:
            self.put("optimizer.warmup_steps", steps, "warmup_steps")
        elif steps or share:
            key = "warmup_steps" if steps else "warmup_ratio"
            if updates := self._shared(key, steps or share, self._run_steps(), self.updates):
                self.put("optimizer.warmup_steps", updates, key)

    def evaluation(self) -> None:
        """Set when held-out data is measured."""
        strategy = self("eval_strategy", self("evaluation_strategy"))
        steps = self("eval_steps", self.peek("logging_steps", DEFAULTS["logging_steps"]))
        if strategy is not None:
            self._every("trainer.test_freq", strategy, "eval_strategy", steps, "eval_steps")

    def saving(self) -> None:
        """Set when checkpoints are written, and the metric of the best one."""
        strategy = self("save_strategy")
        steps = self("save_steps")
        best = self("metric_for_best_model")
        greater = self("greater_is_better")
        if strategy == "best":
            self.put("trainer.save_freq", None, "save_strategy")
        elif strategy is not None or steps is not None:
            steps = self.base.trainer.save_freq if steps is None else steps
            self._every("trainer.save_freq", strategy or "steps", "save_strategy", steps, "save_steps")
        if best is not None:
            if best.startswith("eval_") and best not in self.measured:
                right = "give ours: val-core/<source>/acc/mean@1 for example"
                raise self.refuse("metric_for_best_model", f"and validation has other names here; {right}")
            self.put("trainer.save_best_metric", METRICS.get(best, best), "metric_for_best_model")
        if greater is None and (best or "").endswith("loss"):
            greater = False  # as transformers takes it
        if greater is not None:
            self.put("trainer.save_best_mode", "max" if greater else "min", "greater_is_better")

    def outputs(self) -> None:
        """Set loggers, their interval and progress bars; the trainer uploads."""
        for key in ("push_to_hub", "hub_model_id", "hub_token", "hub_private_repo", "hub_revision"):
            self(key)
        every = self("logging_steps")
        if every is not None:
            self._every("trainer.log_every", "steps", "logging_steps", every, "logging_steps")
        trackers = self("report_to")
        if trackers not in (None, "all", ["all"]):
            named = [trackers] if isinstance(trackers, str) else list(trackers)
            named = [name for name in named if name not in ("none", *ALWAYS)]
            self.put("trainer.loggers", [*ALWAYS, *named], "report_to")
        quiet = self("disable_tqdm")
        if quiet is not None:
            self.put("trainer.progress", not quiet, "disable_tqdm")

    def _every(self, ours: str, strategy: str, strategy_key: str, steps: float | None, steps_key: str) -> None:
        """Set an interval in our steps: none, TRL's steps, or an epoch."""
        if strategy not in ("no", "steps", "epoch"):
            raise self.refuse(strategy_key, "which is not done here; set it to no, steps or epoch")
        if strategy == "no":
            self.put(ours, None, strategy_key)
        elif strategy == "epoch":
            if count := self._shared(strategy_key, 1, self._epoch()):
                self.put(ours, count, strategy_key)
        elif steps and steps < 1:
            if count := self._shared(steps_key, steps, self._run_steps()):
                self.put(ours, count, steps_key)
        elif steps:
            self.put(ours, self._steps(steps_key, steps), steps_key)

    def _epoch(self) -> float | None:
        """Compute our steps of an epoch, once rows and devices are known."""
        return self.around.rows / self.rows if self.around.rows and self.rows else None

    def _run_steps(self) -> float | None:
        """Compute our steps of the run, once the number is known."""
        most = self.peek("max_steps", 0)
        epochs = self.peek("num_train_epochs", self.base.trainer.epochs)
        steps = most / self.updates if most > 0 else self.base.trainer.total_steps
        return steps or ((epoch := self._epoch()) and float(int(epochs * epoch)))

    def _shared(self, key: str, share: float, whole: float | None, updates: int = 1) -> int | None:
        """Compute a share of a number of our steps, or of their updates.

        None while the number is not known.
        """
        if whole is None:
            if self.around.devices is None:
                return None
            raise self.refuse(key, "and the number of rows is not known; give max_steps and numbers of steps")
        return max(1, math.ceil(share * whole * updates))

    def _steps(self, key: str, updates: float) -> int:
        """Convert TRL's steps, of which each is an update, to ours."""
        return self._whole(key, int(updates), self.updates, f"{self.updates} updates of a step here")

    def _whole(self, key: str, value: int, divisor: int, name: str) -> int:
        """Divide a key's value; refuse a remainder."""
        if value % divisor:
            below = value // divisor * divisor
            above = -(-value // divisor) * divisor
            right = f"set it to {below} or {above}" if below else f"set it to {above}"
            raise self.refuse(key, f"which {name} ({divisor}) does not divide; {right}")
        return value // divisor
