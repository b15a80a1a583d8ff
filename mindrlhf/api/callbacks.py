"""Callbacks of a run, as transformers calls them: `on_step_end(args, state, control, **others)`."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any


class TrainerCallback:
    """Optional base class of callbacks; any object may be a callback.

    Possible methods: `on_init_end`, `on_train_begin`, `on_step_begin`, `on_step_end`, `on_log`, `on_evaluate`,
    `on_save` and `on_train_end`. They get the configuration, the state and the control, and by name `model` (path of
    the initial weights), `processing_class`, and `logs` or `metrics`. Under msrun every process calls its own
    callbacks; an exception in a callback ends the run.
    """


@dataclass(slots=True)
class TrainerControl:
    """Requests of callbacks. should_training_stop: the run saves its state and ends."""

    should_training_stop: bool = False


@dataclass
class TrainerState:
    """Progress of a run.

    global_step, max_steps: steps done and steps of the run, counted in this suite's steps. epoch: passes over the
    dataset so far. log_history: metrics of the steps that were logged, and of measurements, under TRL's names and ours.
    """

    global_step: int = 0
    max_steps: int = 0
    epoch: float = 0.0
    log_history: list[dict[str, float]] = field(default_factory=list)
    is_world_process_zero: bool = True


class Callbacks:
    """Callbacks of a trainer with the control that they share.

    args: the trainer's configuration. others: arguments that all callbacks get by name.
    """

    def __init__(self, callbacks: Iterable[Any], args: Any, state: TrainerState, **others: Any):
        self._callbacks: list[Any] = []
        self._args = args
        self._state = state
        self._others = others
        self.control = TrainerControl()
        for callback in callbacks:
            self.add(callback)

    def add(self, callback: Any) -> None:
        """Add a callback; a class is instantiated."""
        self._callbacks.append(callback() if isinstance(callback, type) else callback)

    def __call__(self, event: str, **given: Any) -> None:
        """Call every callback that has a method of this name."""
        for callback in self._callbacks:
            method = getattr(callback, event, None)
            if method is not None:
                changed = method(self._args, self._state, self.control, **self._others, **given)
                self.control = changed or self.control
