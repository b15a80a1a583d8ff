"""Owner's side of one reward process: its calls and replies."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from mindrlhf.rewards.worker import FLOAT32_MAX
from mindrlhf.workers.process import WorkerProcess

Sample = tuple[str, str, Mapping[str, str]]


class Call(NamedTuple):
    """Function and sample of a call, both as indices."""

    function: int
    sample: int


@dataclass(frozen=True)
class Reply:
    """Outcome of a call.

    score: finite, or None for an abstention or failure. seconds: wall time inside the function. error: reason of a
    failure. timed_out: it was the time limit.
    """

    score: float | None = None
    components: Mapping[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    error: str | None = None
    timed_out: bool = False


class RewardProcess(WorkerProcess):
    """Process of reward functions; ready when these are imported.

    needs_ground_truth: for each function, if it fails for a row without one. Its refusal is about a function that
    cannot be resolved.
    """

    def __init__(self, functions: Sequence[tuple[str, Mapping[str, Any]]], timeout_s: float):
        """Start the process. functions: (name, args) each. timeout_s: seconds for one call."""
        self._functions = len(functions)
        self.needs_ground_truth: list[bool] = []
        super().__init__("mindrlhf.rewards.worker", {"functions": functions, "timeout_s": timeout_s}, timeout_s)

    def give(self, calls: Sequence[Call], samples: Sequence[Sample]) -> None:
        """Hand out calls on `samples`; the process must be idle."""
        self.assign(calls, [(call.function, *samples[call.sample]) for call in calls])

    def _greet(self, greeting: Any) -> None:
        if not isinstance(greeting, list) or len(greeting) != self._functions:
            raise ValueError
        self.needs_ground_truth = [bool(needed) for needed in greeting]

    def _reply(self, values: list[Any]) -> Reply:
        match values:
            case [float() | None as score, dict(components), float(seconds), str() | None as error]:
                numbers = [score or 0.0, seconds, *components.values()]
                if all(type(value) is float and abs(value) <= FLOAT32_MAX for value in numbers):
                    return Reply(score, components, seconds, error)
        raise ValueError
