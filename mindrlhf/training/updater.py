"""Optimizer update from groups: micro-batches, gradients, reduction over ranks, AdamW."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from mindspore import nn

from mindrlhf import backend
from mindrlhf.backend.compile.graph import compile_seconds
from mindrlhf.configs.grpo import TrainSettings
from mindrlhf.metrics.timer import Timers
from mindrlhf.models.layer import Side
from mindrlhf.models.routing import Routing
from mindrlhf.parallel.pipeline import WHOLE_MODEL, PipelineAxis
from mindrlhf.token_arrays import TOKEN_ARRAYS
from mindrlhf.training.bad_samples import BadSample, find_bad_samples
from mindrlhf.training.batch import Rows, SequenceGroup, collect, collect_routing, collect_sampled, pad
from mindrlhf.training.block_passes import open_gradients
from mindrlhf.training.objective import Objective
from mindrlhf.training.optimizer import AdamW, UpdateResult
from mindrlhf.types import TrainBatch


@dataclass(frozen=True, eq=False)
class Update:
    """Result of one update on this rank.

    loss: this rank's part of the loss; the sum over data-parallel ranks is the loss.
    metrics: name -> per group, G arrays of float32: the objective's values of each sampled token.
    weighted: name -> sum of weights * values of the same metrics: this rank's part, aggregated as the loss is.
    outputs: per group, G arrays float32[R], the head's output before the update: log-probs, or a critic's values.
    terms: name -> the part of the loss that a side output adds. sides: the side outputs of each micro-batch.
    optimizer_s: seconds of the optimizer, without compiling.
    bad_samples: this rank's samples to blame for a skipped update. routing: of each group, if the decoder records it.
    """

    result: UpdateResult
    loss: float
    metrics: dict[str, list[tuple[np.ndarray, ...]]]
    weighted: dict[str, float]
    outputs: list[tuple[np.ndarray, ...]]
    terms: dict[str, float]
    sides: Sequence[Mapping[Side, np.ndarray]]
    optimizer_s: float
    bad_samples: Sequence[BadSample] = ()
    routing: Sequence[Routing] = ()


class Updater:
    """Minimiser of one objective over a head and its decoder, with one optimizer.

    head: see `training.graphs`; reduce_gradients: sums the gradient buffers over ranks in place, or None on a
    single rank; axis: the pipeline of which the head's decoder is a stage; least_micro_batches: the fewest
    micro-batches, if there are enough groups; seed: of the dropout masks, if the decoder has dropout.
    """

    def __init__(
        self,
        head: nn.Cell,
        objective: Objective,
        optimizer: AdamW,
        settings: TrainSettings,
        reduce_gradients: Callable[[], None] | None = None,
        axis: PipelineAxis = WHOLE_MODEL,
        least_micro_batches: int = 1,
        seed: int = 0,
    ):
        self.optimizer = optimizer
        self._settings = settings
        self._reduce = reduce_gradients
        self._least_micro_batches = least_micro_batches
        self.objective = objective
        self._seed = seed
        self._decoder = head.decoder
        self._gradients = open_gradients(head, objective, optimizer, axis)
        self._replayed = self._gradients.replayed
        self._parts = Timers(compile_seconds)

    def __call__(
        self,
        groups: Sequence[SequenceGroup],
        learning_rate: float,
        *,
        weights: Rows,
        empty: bool = False,
        progress: Callable[[int], None] = lambda tokens: None,
        **fields: Rows,
    ) -> Update:
        """Make one update from this rank's groups.

        weights: see `algorithms.aggregation`, with denominators over all ranks. empty: weights are 0 on all ranks, so
        that only metrics are computed and nothing changes. fields: the objective's fields; others are ignored.
        progress: called after each micro-batch with its number of sampled tokens.
        """
        fields = {name: fields[name] for name in self.objective.fields}
        micros = self._gradients.cut(groups, self._settings, self._least_micro_batches)
        draw = (self._seed, self.optimizer.updates) if self._decoder.drops else None
        forms = self._decoder.pictures, self._replayed
        batches = [pad(micro, groups, weights, fields, draw, *forms) for micro in micros]
        metrics: dict[str, list] = {}
        weighted: dict[str, float] = {}
        terms = dict.fromkeys(dict(self.objective.terms), 0.0)
        outputs, routing = ([None] * len(groups) for _ in range(2))
        loss = 0.0
        tokens = iter([int(batch.mask.sum()) for batch in batches])
        results = self._gradients(batches, lambda: progress(next(tokens)))
        for micro, batch, passed in zip(micros, batches, results, strict=True):
            loss += passed.loss
            for name, value in self.objective.terms_of(passed.sides).items():
                terms[name] += value * float(batch.weights.sum())
            collect(micro, passed.output, groups, outputs)
            if self._decoder.records:
                collect_routing(micro, passed.sides, self._decoder.routing, groups, routing)
            for name, array in passed.metrics.items():
                collect_sampled(micro, array, groups, metrics.setdefault(name, [None] * len(groups)))
                weighted[name] = weighted.get(name, 0.0) + float((batch.weights * array).sum())
        if not math.isfinite(loss):
            # The gradient may still be finite, and other ranks have their own losses: NaN in the sum of gradients makes
            # all ranks skip the update.
            backend.write(self.optimizer.gradients[0], np.nan)
        if self._reduce:
            self._reduce()
        with self._parts("optimizer"):
            result = self.optimizer.step(learning_rate, empty)
        optimizer_s = self._parts.collect()["optimizer"]
        bad_samples = find_bad_samples(micros, batches, results, self._test_alone) if result.failed else ()
        return Update(
            result=result,
            loss=loss,
            metrics=metrics,
            weighted=weighted,
            outputs=outputs,
            terms=terms,
            sides=[passed.sides for passed in results],
            optimizer_s=optimizer_s,
            bad_samples=bad_samples,
            routing=routing if self._decoder.records else (),
        )

    def rehearse(self, groups: Sequence[SequenceGroup]) -> None:
        """Run each graph of an update once, on the groups' first micro-batch.

        Nothing depends on what graphs compute.
        """
        micro = self._gradients.cut(groups, self._settings, self._least_micro_batches)[0]
        fields = {name: self._filled(name, groups) for name in self.objective.fields}
        draw = (self._seed, self.optimizer.updates) if self._decoder.drops else None
        forms = self._decoder.pictures, self._replayed
        self._gradients([pad(micro, groups, self._filled("weights", groups), fields, draw, *forms)], lambda: None)
        if self._reduce:
            self._reduce()
        self.optimizer.norm()
        self.optimizer.apply(0.0)
        self.optimizer.discard()

    @staticmethod
    def _filled(name: str, groups: Sequence[SequenceGroup]) -> Rows:
        """Make rows of an array in `token_arrays` for groups without it."""
        array = TOKEN_ARRAYS[name]
        return [[np.full(len(one), array.padding, array.dtype) for one in group.responses] for group in groups]

    @property
    def _test_alone(self) -> Callable[[TrainBatch], bool] | None:
        """Test of one micro-batch.

        None if ranks with other experts, or other parts of the weights, would have to run it too.
        """
        gathers = any(block.gathers for block in self._decoder.blocks)
        alone = self._decoder.spread.size == 1 and not gathers
        return self._is_finite if alone else None

    def _is_finite(self, batch: TrainBatch) -> bool:
        """Test one micro-batch's loss and gradients alone; zeroes the gradients."""
        (result,) = self._gradients([batch], lambda: None)
        norm = self.optimizer.norm()
        self.optimizer.discard()
        return math.isfinite(result.loss) and math.isfinite(norm)
