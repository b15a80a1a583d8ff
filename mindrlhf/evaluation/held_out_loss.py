"""Loss of a fine-tuned model on held-out demonstrations."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mindrlhf.metrics.progress import Progress
from mindrlhf.parallel.data_parallel import DataParallel
from mindrlhf.training.batch import SequenceGroup
from mindrlhf.training.scoring import Scorer
from mindrlhf.types import taken

LOSS = "val/loss"


@dataclass(frozen=True)
class HeldOutLoss:
    """Mean of -log p over the assistant's tokens of held-out demonstrations.

    pairs: all of them; each data-parallel rank scores its share.
    """

    scorer: Scorer
    pairs: Sequence[SequenceGroup]
    data_parallel: DataParallel
    progress: Progress

    def __call__(self, step: int) -> dict[str, float]:
        """Compute verl's `val/loss` in nats per token, the same on all ranks."""
        own = self.pairs[self.data_parallel.rank :: self.data_parallel.size]
        with self.progress("held-out loss", len(own), "rows") as advance:
            scores = self.scorer(own, advance)
        rows = [row for pair, found in zip(own, scores, strict=True) for row in taken(found, pair.sampled)]
        loss = -sum(float(row.sum(dtype=np.float64)) for row in rows)
        tokens = sum(map(len, rows))
        loss, tokens = self.data_parallel.sum(np.array([loss, tokens], np.float64))
        return {LOSS: float(loss / tokens)}
