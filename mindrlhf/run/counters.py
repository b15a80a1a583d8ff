"""Counters that decide when a run saves and ends; checkpoints hold them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

from mindrlhf.configs.run import HELD_OUT
from mindrlhf.errors import UserError
from mindrlhf.files.text import nearest
from mindrlhf.training.updater import Update


@dataclass
class Best:
    """Best value of one metric so far, and its step; mode: max or min."""

    metric: str | None
    mode: str
    value: float | None = None
    step: int | None = None

    def improved(self, metrics: Mapping[str, float], step: int) -> bool:
        """Test that this step is the best so far; UserError without the metric."""
        name = self.metric
        measured = any(other.startswith(HELD_OUT) for other in metrics)
        if name is None or (name not in metrics and name.startswith(HELD_OUT) and not measured):
            return False
        if name not in metrics:
            near = nearest(name, metrics, cutoff=0.4)
            hint = f"did you mean {near}?" if near else f"this step has {', '.join(sorted(metrics))}."
            raise UserError(f"trainer.save_best_metric is {name}, and there is no such metric; {hint}")
        sign = 1 if self.mode == "max" else -1
        value = metrics[name]
        better = isfinite(value) and (self.value is None or sign * value > sign * self.value)
        if better:
            self.value = value
            self.step = step
        return better

    def state_dict(self) -> dict[str, Any]:
        return {"metric": self.metric, "value": self.value, "step": self.step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state; a state of another metric is ignored."""
        if state["metric"] == self.metric:
            self.value = state["value"]
            self.step = state["step"]


@dataclass
class _InRow:
    """Number of consecutive events, which a checkpoint holds."""

    in_row: int = field(default=0, kw_only=True)

    def state_dict(self) -> dict[str, Any]:
        return {"in_row": self.in_row}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.in_row = state["in_row"]


@dataclass
class Patience(_InRow):
    """Number of consecutive measurements without an improvement.

    limit: the number at which patience runs out; None for never.
    """

    limit: int | None

    def count(self, better: bool) -> None:
        """Count one measurement."""
        self.in_row = 0 if better else self.in_row + 1

    @property
    def over(self) -> bool:
        return self.limit is not None and self.in_row >= self.limit


@dataclass
class BadUpdates(_InRow):
    """Number of consecutive updates skipped for a non-finite loss or gradient."""

    def count(self, updates: Sequence[Update]) -> int:
        """Count the longest run of skipped updates, earlier steps included."""
        most = 0
        for update in updates:
            self.in_row = self.in_row + 1 if update.result.failed else 0
            most = max(most, self.in_row)
        return most
