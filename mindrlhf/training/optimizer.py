"""AdamW over accumulated gradients, in place, as two compiled graphs.

The host checks the global norm before the update: a non-finite gradient never changes a weight.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from mindspore import Parameter, ParameterTuple, Tensor, ops

from mindrlhf.backend.compile.graph import Graph
from mindrlhf.backend.memory import zero_parameter
from mindrlhf.backend.operators import COMPOSED, Operators
from mindrlhf.configs.grpo import OptimizerSettings
from mindrlhf.models.parameters import ParameterSpec
from mindrlhf.parallel.buckets import buckets
from mindrlhf.training.moments import Draws, Moments, Place


def zeros_like(parameters: list[Parameter], prefix: str) -> ParameterTuple:
    """Make float32 zeros of each parameter's shape, named `prefix.name`."""
    return ParameterTuple([zero_parameter(f"{prefix}.{p.name}", p.shape) for p in parameters])


class SquaredNorm(Graph):
    """Sum of squares of all gradients, float32 scalar."""

    def __init__(self, gradients: ParameterTuple, operators: Operators):
        super().__init__("optimizer/norm")
        self.gradients = gradients
        self.squared_norm = operators.squared_norm

    def construct(self):
        return self.squared_norm(self.gradients)


@dataclass(frozen=True)
class ShardedNorm:
    """Rule for the squared norm of gradients over several ranks.

    counted: for each parameter, True if this rank's part enters the sum (only one of several ranks with the same part
    does). sum: adds a number over the ranks that together hold the model.
    """

    counted: Sequence[bool]
    sum: Callable[[float], float]


@dataclass(frozen=True)
class ReplicaShare:
    """Rows of each parameter that this data-parallel replica updates for all.

    parameters: these rows as separate parameters; the model's parameter itself if all of its rows are updated here.
    rows: their positions. gather: writes every replica's rows into all replicas' parameters.
    """

    parameters: Sequence[Parameter]
    rows: Sequence[slice]
    gather: Callable[[], object]


def _chosen(parameters: Sequence[Parameter], indices: Iterable[int]) -> ParameterTuple:
    return ParameterTuple([parameters[index] for index in indices])


class Apply(Graph):
    """Update of all parameters and moments by AdamW, in place; gradients are zero afterwards.

    rows: (first, end) of the rows of each gradient that belong to the parameter.
    The operators have no bias correction: w -= lr * (m / (sqrt(v) + eps) + decay * w). With
    lr' = lr * sqrt(1 - b2^t) / (1 - b1^t), eps' = eps * sqrt(1 - b2^t) and decay' = decay * lr / lr' it is AdamW
    exactly (Loshchilov & Hutter 2019, algorithm 2; Kingma & Ba 2015, section 2, last paragraph).
    """

    def __init__(self, parameters, gradients, first, second, decays: list[bool], rows: list[tuple[int, int]], adamw):
        super().__init__("optimizer/apply", tuple(decays), tuple(rows))
        self.parameters = parameters
        self.gradients = gradients
        self.first = first
        self.second = second
        self.decays = tuple(decays)
        self.rows = tuple(rows)
        self.adamw = adamw

    def construct(self, *numbers):
        return self.adamw(self.parameters, self.gradients, self.first, self.second, self.decays, self.rows, numbers)


class RoundedApply(Graph):
    """Update as of `Apply`, with moments that are rounded by random numbers.

    first, second, scales, columns: see `Operators.rounded_adamw`.
    """

    def __init__(self, parameters, gradients, first, second, scales, decays, rows, columns, adamw):
        super().__init__("optimizer/rounded_apply", tuple(decays), tuple(rows), tuple(columns))
        self.parameters = parameters
        self.gradients = gradients
        self.first = first
        self.second = second
        self.scales = scales
        self.decays = tuple(decays)
        self.rows = tuple(rows)
        self.columns = tuple(columns)
        self.adamw = adamw

    def construct(self, row_draws, column_draws, *numbers):
        moments = (self.first, self.second, self.scales)
        layout = (self.decays, self.rows)
        draws = (row_draws, column_draws)
        return self.adamw(self.parameters, self.gradients, *moments, *layout, numbers, draws, self.columns)


class Discard(Graph):
    """Graph that zeroes the gradient buffers."""

    def __init__(self, gradients: ParameterTuple):
        super().__init__("optimizer/discard")
        self.gradients = gradients

    def construct(self, done):
        for gradient in self.gradients:
            done = ops.depend(done, ops.assign(gradient, ops.zeros_like(gradient)))
        return done


@dataclass(frozen=True)
class UpdateResult:
    """Outcome of an optimizer step.

    grad_norm: global L2 norm before clipping; applied: False for an update that was skipped.
    """

    grad_norm: float
    learning_rate: float
    applied: bool

    @property
    def failed(self) -> bool:
        """True for an update skipped because of a non-finite gradient or loss."""
        return not math.isfinite(self.grad_norm)

    @property
    def empty(self) -> bool:
        """True for an update skipped because no token was trained on."""
        return not self.applied and not self.failed


class AdamW:
    """Optimizer: gradient buffers, both moments, the update counter.

    parameters: the float32 weights to train, or this rank's shards of them; specs: their rows of the parameter table
    (for weight decay). norm: rule for the norm of the whole model's gradients; None on a rank that holds the whole
    model. share: rows that this replica updates; None for all. own_rows: parameters of `share` that are not the
    model's. block_numbers: parameters are updated in blocks of at most this many numbers (or one parameter); None is
    all at once. blocks: parameter indices of each block; before_block is called with a block's index, so that only this
    block's moments need to be in memory. operators: composed ones by default. places: of the rows that are updated
    here, in the whole parameters; these by default. seed: of the random numbers that round moments.
    """

    def __init__(
        self,
        settings: OptimizerSettings,
        parameters: list[Parameter],
        specs: list[ParameterSpec],
        norm: ShardedNorm | None = None,
        share: ReplicaShare | None = None,
        block_numbers: int | None = None,
        operators: Operators = COMPOSED,
        places: Sequence[Place] | None = None,
        seed: int = 0,
    ):
        self.settings = settings
        self.parameters = ParameterTuple(parameters)
        self.gradients = zeros_like(parameters, "gradient")
        whole = [slice(0, parameter.shape[0]) for parameter in parameters]
        share = share or ReplicaShare(parameters, whole, lambda: None)
        trained = {id(parameter) for parameter in parameters}
        self.own_rows = [parameter for parameter in share.parameters if id(parameter) not in trained]
        self.moments = Moments(settings.state, share.parameters)
        self.updates = 0
        norm = norm or ShardedNorm([True] * len(parameters), float)
        counted = [gradient for gradient, counts in zip(self.gradients, norm.counted, strict=True) if counts]
        self._squares = SquaredNorm(ParameterTuple(counted), operators) if counted else None
        self._sum = norm.sum
        self._gather = share.gather
        sizes = [parameter.size for parameter in parameters]
        self.blocks = buckets(sizes, block_numbers or sum(sizes))
        self.before_block: Callable[[int], None] = lambda block: None
        places = places or [Place.whole(spec) for spec in specs]
        self._apply = [self._graphs(block, share, specs, places, seed, operators) for block in self.blocks]
        self._discard = Discard(self.gradients)

    @property
    def first(self) -> ParameterTuple:
        """First moments of all parameters."""
        return self.moments.first

    @property
    def second(self) -> ParameterTuple:
        """Second moments of all parameters."""
        return self.moments.second

    def _graphs(
        self,
        block: Sequence[int],
        share: ReplicaShare,
        specs: Sequence[ParameterSpec],
        places: Sequence[Place],
        seed: int,
        operators: Operators,
    ) -> list[tuple[Graph, Draws | None]]:
        """Make the graphs that update a block, with the random numbers that each takes."""

        def inputs(indices: Sequence[int]) -> dict[str, Any]:
            return {
                "parameters": _chosen(share.parameters, indices),
                "gradients": _chosen(self.gradients, indices),
                "first": _chosen(self.first, indices),
                "second": _chosen(self.second, indices),
                "decays": [specs[i].decays for i in indices],
                "rows": [(share.rows[i].start, share.rows[i].stop) for i in indices],
            }

        exact = [index for index in block if self.moments.forms[index] == "float32"]
        rounded = [index for index in block if index not in exact]
        graphs: list[tuple[Graph, Draws | None]] = []
        if exact:
            graphs.append((Apply(**inputs(exact), adamw=operators.adamw), None))
        if rounded:
            own = [places[index] for index in rounded]
            scales = [kept[index] for kept in self.moments.scales for index in rounded if kept[index] is not None]
            graph = RoundedApply(
                **inputs(rounded),
                scales=ParameterTuple(scales) if scales else (),
                columns=[place.column for place in own],
                adamw=operators.rounded_adamw,
            )
            graphs.append((graph, Draws(seed, own)))
        return graphs

    def step(self, rate: float, empty: bool = False) -> UpdateResult:
        """Clip, update with learning rate `rate`, and zero the gradients.

        A non-finite norm skips the update.
        empty: no token was trained on; then weights, moments and the counter do not change either.
        """
        norm = self.norm()
        if empty or not math.isfinite(norm):
            self.discard()
            return UpdateResult(norm, rate, False)
        s = self.settings
        self.apply(rate, min(1.0, s.max_grad_norm / (norm + 1e-6)) if s.max_grad_norm else 1.0)
        return UpdateResult(norm, rate, True)

    def apply(self, rate: float, scale: float = 1.0) -> None:
        """Update with the gradients times `scale`, whatever they are, and zero them."""
        s = self.settings
        self.updates += 1
        first, second = 1 - s.beta1**self.updates, math.sqrt(1 - s.beta2**self.updates)
        fused = rate * second / first
        decay = s.weight_decay * rate / fused if fused else 0.0
        values = [Tensor(np.float32(value)) for value in (fused, s.beta1, s.beta2, s.eps * second, decay, scale)]
        for block, graphs in enumerate(self._apply):
            self.before_block(block)
            for apply, draws in graphs:
                apply(*(draws(self.updates) if draws else ()), *values).asnumpy()
        self._gather()

    def state_dict(self) -> dict[str, int]:
        """Return the optimizer's state without the moments."""
        return {"updates": self.updates}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Restore `state_dict`; the moments are set through `moments`."""
        self.updates = state["updates"]

    def discard(self) -> None:
        """Zero the gradients."""
        self._discard(Tensor(0.0))

    def norm(self) -> float:
        """Compute the global L2 norm of the gradients."""
        return self._sum(float(self._squares().asnumpy()) if self._squares else 0.0) ** 0.5


def learning_rate(settings: OptimizerSettings, update: int, total_updates: int) -> float:
    """Compute the rate of update 0, 1, ...: warm-up, then constant, linear or cosine.

    The last update of `total_updates` is one step before min_lr, so that no update is wasted at a rate of zero.
    """
    if update < settings.warmup_steps:
        return settings.lr * (update + 1) / settings.warmup_steps
    done = min(1.0, (update - settings.warmup_steps) / max(1, total_updates - settings.warmup_steps))
    shares = {"linear": 1.0 - done, "cosine": 0.5 * (1.0 + math.cos(math.pi * done))}
    if settings.lr_decay not in shares:
        return settings.lr
    return settings.min_lr + (settings.lr - settings.min_lr) * shares[settings.lr_decay]
