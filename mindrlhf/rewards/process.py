"""Owner's side of one reward process: its calls and replies."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from mindrlhf.rewards.batches import Sample, Steps, listed
from mindrlhf.rewards.results import FLOAT32_MAX
from mindrlhf.workers.process import WorkerProcess


class Call(NamedTuple):
    """Function and samples of a call, as indices; several for a batch function."""

    function: int
    samples: range


@dataclass(frozen=True)
class Reply:
    """Outcome of a call.

    score: finite, or None for an abstention or failure. details: further numbers and texts. seconds: wall time inside
    the function. error: reason of a failure. timed_out: the reason was the time limit.
    """

    score: float | None = None
    details: Mapping[str, float | str] = field(default_factory=dict)
    seconds: float = 0.0
    error: str | None = None
    timed_out: bool = False


class RewardProcess(WorkerProcess):
    """Process of reward functions; ready when the functions are imported.

    needs_ground_truth, takes_batch, takes_ids: for each function, whether it fails for a row without one, whether it is
    called for all samples at once, and with their token ids. refusal: the error for a function that cannot be resolved.
    batch: what its calls belong to, for the owner.
    """

    def __init__(self, functions: Sequence[tuple[str, Mapping[str, Any]]], timeout_s: float):
        """Start the process. functions: (name, args) each. timeout_s: seconds for one call."""
        self._functions = len(functions)
        self.batch: Any = None
        self.needs_ground_truth: list[bool] = []
        self.takes_batch: list[bool] = []
        self.takes_ids: list[bool] = []
        super().__init__("mindrlhf.rewards.worker", {"functions": functions, "timeout_s": timeout_s}, timeout_s)

    def give(self, calls: Sequence[Call], samples: Sequence[Sample], steps: Steps) -> None:
        """Hand out calls on `samples`; the process must be idle."""
        self.assign(calls, [self._request(call, samples, steps) for call in calls])

    def _request(self, call: Call, samples: Sequence[Sample], steps: Steps) -> tuple[Any, ...]:
        takes_ids = self.takes_ids[call.function]
        own = [_message(samples[place], takes_ids) for place in call.samples]
        return (call.function, own, steps) if self.takes_batch[call.function] else (call.function, own[0])

    def _greet(self, greeting: Any) -> None:
        if not isinstance(greeting, list) or len(greeting) != self._functions:
            raise ValueError
        answers = [tuple(map(bool, each)) for each in greeting]
        self.needs_ground_truth, self.takes_batch, self.takes_ids = map(list, zip(*answers, strict=True))

    def _reply(self, values: list[Any]) -> list[Reply]:
        """Convert a reply to the replies of its call's samples."""
        call = self.calls[0] if self.calls else None
        match values:
            case [list(outcomes), float(seconds)] if call and len(outcomes) == len(call.samples):
                share = seconds / len(outcomes)
                return [_checked([*one[:2], share, *one[2:]] if isinstance(one, list) else []) for one in outcomes]
            case [_, _, _, _]:
                return [_checked(values)]
        raise ValueError


def _message(sample: Sample, with_ids: bool) -> dict[str, Any]:
    """Name the values of a sample that its function takes."""
    values: dict[str, Any] = {"prompt": sample.prompt, "completion": sample.completion, "fields": sample.fields}
    if with_ids:
        values |= {"prompt_ids": listed(sample.prompt_ids), "completion_ids": listed(sample.completion_ids)}
    return values


def _checked(values: list[Any]) -> Reply:
    """Convert the values of one sample; ValueError for invalid ones."""
    match values:
        case [float() | None as score, dict(details), float(seconds), str() | None as error]:
            numbers = [score or 0.0, seconds, *(value for value in details.values() if type(value) is not str)]
            if all(type(value) is float and abs(value) <= FLOAT32_MAX for value in numbers):
                return Reply(score, details, seconds, error)
    raise ValueError
