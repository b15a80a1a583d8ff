"""Batches that are drawn and not trained on yet; checkpoints hold them."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from mindrlhf.records.formats import pack, unpack
from mindrlhf.records.rows import experiences_of, rows_of
from mindrlhf.types import Experience, Prompt


@dataclass(frozen=True, eq=False)
class Batch:
    """Experiences of one step, of all ranks.

    figures: metrics of how they were collected, by name. position: rows of the dataset drawn up to and with them.
    whole: False if answers may be unfinished, and none is scored.
    """

    experiences: list[Experience]
    figures: Mapping[str, float]
    position: int
    whole: bool = True


class BatchesAhead:
    """Queue of batches by the step that trains on them, alike on all ranks.

    As a counter it has everything but the experiences, which are a blob. A checkpoint restores the counter first.
    prompts: see `records.rows.experiences_of`.
    """

    def __init__(self, prompts: Mapping[int, Prompt] | None = None) -> None:
        self._prompts = prompts
        self._batches: dict[int, Batch] = {}

    @property
    def steps(self) -> tuple[int, ...]:
        """Steps whose batches wait, in order."""
        return tuple(self._batches)

    def __getitem__(self, step: int) -> Batch:
        return self._batches[step]

    def put(self, step: int, batch: Batch) -> None:
        """Add the next step's batch, or another state of one that waits."""
        self._batches[step] = batch

    def take(self, step: int) -> Batch:
        """Remove and return the batch of a step."""
        return self._batches.pop(step)

    def state_dict(self) -> dict[str, Any]:
        """Describe the batches by step."""
        return {
            str(step): {"position": batch.position, "figures": dict(batch.figures), "whole": batch.whole}
            for step, batch in self._batches.items()
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`; the experiences follow by `decode`."""
        self._batches = {
            int(step): Batch([], one["figures"], one["position"], one.get("whole", True)) for step, one in state.items()
        }

    def snapshot(self) -> dict[int, Batch]:
        """Copy the queue."""
        return dict(self._batches)

    def encode(self, batches: dict[int, Batch]) -> bytes:
        """Encode the experiences of a snapshot as bytes."""
        return pack([row for step, batch in batches.items() for row in rows_of(step, batch.experiences)])

    def decode(self, content: bytes) -> None:
        """Restore the experiences; ValueError for those of other steps than the counter's."""
        stored = dict(experiences_of(unpack(content), self._prompts))
        if sorted(stored) != sorted(self._batches):
            raise ValueError(f"it has batches of steps {[*stored]}, and counters.ahead has {[*self._batches]}")
        self._batches = {step: replace(self._batches[step], experiences=stored[step]) for step in stored}


def in_parts(state: Mapping[str, Any]) -> bool:
    """Test if a `state_dict` has answers that may be unfinished."""
    return any(not one.get("whole", True) for one in state.values())
