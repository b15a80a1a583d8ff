"""Pipeline stages: the schedule of micro-batches, and messages between neighbours."""

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import numpy as np

from mindrlhf.backend.comm.collectives import Collectives

Action = tuple[Literal["forward", "backward"], int]


def one_forward_one_backward(stage: int, stages: int, micro_batches: int) -> Iterator[Action]:
    """Compute the 1F1B schedule of one stage: (pass, micro-batch) in order.

    The schedule is PipeDream-Flush of Narayanan et al. 2020 (arXiv:2006.09503, section 2.2): a forward pass for
    each stage after this one, then one backward pass after each forward, then the rest of the backward passes. At most
    `stages - stage` micro-batches are in flight in a stage at any time.
    """
    ahead = min(stages - stage - 1, micro_batches)
    for index in range(micro_batches + ahead):
        if index < micro_batches:
            yield "forward", index
        if index >= ahead:
            yield "backward", index - ahead


class PipelineAxis:
    """One rank's place on the pipeline axis, and its messages to neighbouring stages.

    group: the global ranks along it, first stage first. Arrays are float32. All ranks of the job build their axis at
    the same time. `PipelineAxis()` is a whole model on one rank.
    """

    def __init__(self, collectives: Collectives | None = None, group: Sequence[int] = (0,)):
        self.size = len(group)
        self.stage = 0
        if self.size > 1:
            self._collectives = collectives
            self._group = tuple(group)
            self._peers = collectives.peers()
            self.stage = self._group.index(collectives.world.rank)
        self.is_first, self.is_last = self.stage == 0, self.stage == self.size - 1

    def send(self, array: np.ndarray, step: Literal[1, -1]) -> None:
        """Send to the next stage (1) or the previous (-1); returns at once."""
        self._peers.send(array, self._group[self.stage + step])

    def receive(self, shape: tuple[int, ...], step: Literal[1, -1]) -> np.ndarray:
        return self._peers.receive(np.empty(shape, np.float32), self._group[self.stage + step])

    def from_last(self, value: Any) -> Any:
        """Broadcast a picklable value from the last stage to every stage."""
        if self.size == 1:
            return value
        return self._collectives.broadcast_object(value, self._group[-1], self._group)

    def gather(self, value: Any) -> list[Any]:
        """Collect every stage's picklable value, the first stage's first."""
        return [value] if self.size == 1 else self._collectives.all_gather_object(value, self._group)


WHOLE_MODEL = PipelineAxis()
