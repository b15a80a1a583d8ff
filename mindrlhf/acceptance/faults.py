"""Faults to put into the program, as a test of the kit.

The kit has to find and name each of them.

`mindrlhf acceptance --inject NAME` puts one in; `python -m mindrlhf.acceptance.faults NAME train ...` runs a command
with it.
"""

import copy
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from unittest import mock

import numpy as np
from mindspore import Parameter, Tensor, nn

from mindrlhf import backend
from mindrlhf.acceptance import layers
from mindrlhf.algorithms import kl
from mindrlhf.backend.comm import graph_collectives
from mindrlhf.backend.comm.collectives import Collectives
from mindrlhf.backend.device import Device
from mindrlhf.backend.memory import STORES
from mindrlhf.backend.operators import Operators
from mindrlhf.errors import UserError
from mindrlhf.models import decoder
from mindrlhf.models.experts import ExpertsHalf
from mindrlhf.models.head import TokenLogProbs
from mindrlhf.models.layer import ScaleGradient
from mindrlhf.reshard.online import OnlineReshard
from mindrlhf.rollout import slots
from mindrlhf.training.optimizer import AdamW, SquaredNorm

OFF = 1.01  # of a factor that should be 1

Inject = Callable[[Device], AbstractContextManager]


@dataclass(frozen=True)
class Fault:
    """Fault, and where the kit has to name it.

    words: what is wrong. check, part: in the name of a check and of its finding that have to fail. inject: puts it in.
    """

    words: str
    check: str
    part: str
    inject: Inject


@contextmanager
def injected(name: str, device: Device) -> Iterator[None]:
    """Put a fault in; UserError for an unknown one."""
    if name not in FAULTS:
        raise UserError(f"--inject {name}: there is no such fault; there are {', '.join(FAULTS)}.")
    with FAULTS[name].inject(device):
        yield


def in_operator(name: str, broken: Callable[[Callable], Callable]) -> Inject:
    """Break one operator of the device.

    broken: makes the wrong form from the right one.
    """

    def inject(device: Device) -> AbstractContextManager:
        kind = type(device)
        right = kind.operators

        def operators(self: Device, dtype: str = "float32", weights: str = "train") -> Operators:
            return _with_fault(right(self, dtype, weights), name, broken)

        return mock.patch.object(kind, "operators", operators)

    return inject


def _with_fault(operators: Operators, name: str, broken: Callable[[Callable], Callable]) -> Operators:
    """Copy operators with one broken, also among the composed ones."""
    faulty = copy.copy(operators)
    object.__setattr__(faulty, name, broken(getattr(operators, name)))
    composed = operators.composed
    if composed is not operators:
        inner = _with_fault(composed, name, broken)
        faulty.__class__ = type("Faulty", (type(operators),), {"composed": property(lambda self: inner)})
    return faulty


def scaled(right: Callable) -> Callable:
    def broken(*inputs):
        return right(*inputs) * OFF

    return broken


def without_bias(right: Callable) -> Callable:
    def broken(x, weight, bias):
        return right(x, weight, bias * 0.0)

    return broken


def exchanged(right: Callable) -> Callable:
    def broken(gate, up):
        return right(up, gate)

    return broken


def turned_back(right: Callable) -> Callable:
    def broken(x, cos, sin):
        return right(x, cos, -sin)

    return broken


def wrong_gradient(right: Callable) -> Callable:
    identity = ScaleGradient(OFF)

    def broken(gate, up):
        return right(identity(gate), up)

    return broken


def wrong_scale(right: Callable) -> Callable:
    def broken(query, key, value, view, split, scale):
        return right(query, key, value, view, split, scale * 1.02)

    return broken


def keys_as_values(right: Callable) -> Callable:
    def broken(query, key, value, key_cache, value_cache, view, scale):
        return right(query, key, key, key_cache, value_cache, view, scale)

    return broken


def to_other_slots(right: Callable) -> Callable:
    def broken(places, rows, limit, prefilled, caches):
        return right(places, rows[::-1], limit, prefilled, caches)

    return broken


def ascending(right: Callable) -> Callable:
    def broken(parameters, gradients, first, second, decays, rows, numbers):
        return right(parameters, gradients, first, second, decays, rows, (-numbers[0], *numbers[1:]))

    return broken


def patched(target: object, name: str, make: Callable[[Callable], Callable]) -> Inject:
    """Replace an attribute of a class or module by what `make` makes of it."""
    return lambda device: mock.patch.object(target, name, make(getattr(target, name)))


def _after_init(change: Callable[[nn.Cell], None]) -> Callable[[Callable], Callable]:
    """Change a Cell when it has been made."""

    def make(right: Callable) -> Callable:
        def init(self, *given, **named):
            right(self, *given, **named)
            change(self)

        return init

    return make


def _lost_writes(device: Device) -> AbstractContextManager:
    """Let `asnumpy` give copies, as on a device, while writes take them for views."""

    def asnumpy(parameter: Parameter) -> np.ndarray:
        return np.array(Tensor.asnumpy(parameter))

    return mock.patch.object(Parameter, "asnumpy", asnumpy, create=True)


def _kept_once(device: Device) -> AbstractContextManager:
    """Let a store keep only what it puts away first."""
    kind = STORES[device.swap]
    right = kind.put_away
    kept: set[int] = set()

    def put_away(self, keep: bool) -> None:
        right(self, keep and id(self) not in kept)
        kept.add(id(self))

    return mock.patch.object(kind, "put_away", put_away)


class _Negative(nn.Cell):
    def __init__(self, cell):
        super().__init__(auto_prefix=False)
        self.cell = cell

    def construct(self, x):
        return -self.cell(x)


def _negative_sums(right: Callable) -> Callable:
    def broken(collectives, group):
        found = right(collectives, group)
        return _Negative(found) if len(group) > 1 else found

    return broken


def _reversed_gathers(right: Callable) -> Callable:
    def broken(self, array, group=None):
        return right(self, array, group)[::-1]

    return broken


def _next_rows(cell: nn.Cell) -> None:
    cell.rank = (cell.rank + 1) % cell.size


def _without_sum(cell: nn.Cell) -> None:
    cell.all_reduce = nn.Identity()


def _first_tensor_stays(right: Callable) -> Callable:
    def broken(self, verify=False):
        first = self._filled[0]
        before = np.array(backend.read(self.destination[first]))
        found = right(self, verify)
        backend.write(self.destination[first], before)
        return found

    return broken


def _spoiled_norm(right: Callable) -> Callable:
    def broken(specs, read):
        def spoiled(spec):
            values = read(spec)
            return values * OFF if spec.name == "model.layers.1.ffn_norm.weight" else values

        return right(specs, spoiled)

    return broken


def _other_base(right: Callable) -> Callable:
    return lambda config, positions: right(config.model_copy(update={"rope_theta": 2 * config.rope_theta}), positions)


def _unnormalised(cell: ExpertsHalf) -> None:
    cell.normalises = False


def _without_temperature(right: Callable) -> Callable:
    def init(self, temperature, *given, **named):
        right(self, 1.0, *given, **named)

    return init


def _other_numbers(right: Callable) -> Callable:
    return lambda seed, step, *others: right(seed, step + 1, *others)


def _unclipped(right: Callable) -> Callable:
    def step(self, *given, **named):
        self.settings = self.settings.model_copy(update={"max_grad_norm": 0.0})
        return right(self, *given, **named)

    return step


def _slow_learner(right: Callable) -> Callable:
    return lambda self, rate, empty=False: right(self, rate / 2, empty)


def _negative_kl(device: Device) -> AbstractContextManager:
    right = kl.ESTIMATORS["k3"]

    def broken(log_ratio):
        return -right(log_ratio)

    return mock.patch.dict(kl.ESTIMATORS, {"k3": broken})


def _killed(right: Callable) -> Callable:
    def init(self, *given, **named):
        os.kill(os.getpid(), signal.SIGKILL)

    return init


def _standing_still(right: Callable) -> Callable:
    def init(self, *given, **named):
        time.sleep(3600)

    return init


FAULTS: Mapping[str, Fault] = {
    "lost_process": Fault("a process that dies", "squared_norm", "its end", patched(SquaredNorm, "__init__", _killed)),
    "hang": Fault("a check that hangs", "squared_norm", "its end", patched(SquaredNorm, "__init__", _standing_still)),
    "linear": Fault("products 1% too large", "linear ", "output", in_operator("linear", scaled)),
    "linear_bias": Fault("no bias", "linear_bias", "output", in_operator("linear_bias", without_bias)),
    "rms_norm": Fault("norms 1% too large", "rms_norm", "output", in_operator("rms_norm", scaled)),
    "rotary": Fault("heads turned the other way", "rotary", "output", in_operator("rotary", turned_back)),
    "swiglu": Fault("gate and up exchanged", "swiglu", "output", in_operator("swiglu", exchanged)),
    "swiglu_gradient": Fault(
        "a gradient 1% too large", "swiglu", "gradient of gate", in_operator("swiglu", wrong_gradient)
    ),
    "group_attention": Fault(
        "scores 2% too large", "group_attention", "output", in_operator("group_attention", wrong_scale)
    ),
    "decode_attention": Fault(
        "keys in the values' cache", "decode_attention", "values", in_operator("decode_attention", keys_as_values)
    ),
    "admit": Fault("prompts in each other's slots", "admit", "of the prompts", in_operator("admit", to_other_slots)),
    "squared_norm": Fault("norm 1% too large", "squared_norm", "sum", in_operator("squared_norm", scaled)),
    "adamw": Fault("steps uphill", "adamw", "weight 0", in_operator("adamw", ascending)),
    "lost_write": Fault("a write into a copy", "memory: writes", "after a write", _lost_writes),
    "stale_swap": Fault("weights of an earlier time", "memory: out and back", "second time", _kept_once),
    "negative_sum": Fault(
        "a sum with the wrong sign",
        "collectives: sums in graphs",
        "sum over",
        patched(graph_collectives, "graph_all_reduce", _negative_sums),
    ),
    "rank_order": Fault(
        "rows in the wrong order of ranks",
        "collectives: gathers",
        "float32 over",
        patched(Collectives, "all_gather", _reversed_gathers),
    ),
    "other_rows": Fault(
        "the next rank's rows",
        "collectives: rows in graphs",
        "rows scattered",
        patched(graph_collectives.ScatterRows, "__init__", _after_init(_next_rows)),
    ),
    "unsummed_gradient": Fault(
        "the gradient of one rank alone",
        "collectives: sums in graphs",
        "gradient of the entry",
        patched(graph_collectives.CopyToGroup, "__init__", _after_init(_without_sum)),
    ),
    "reshard": Fault("a tensor that stays", "reshard on", "dp", patched(OnlineReshard, "run", _first_tensor_stays)),
    "rotary_base": Fault(
        "frequencies of another base", "layer 0 attention", "rows", patched(decoder, "rotary_table", _other_base)
    ),
    "temperature": Fault(
        "log-probs without the temperature",
        "head in",
        "log-probs",
        patched(TokenLogProbs, "__init__", _without_temperature),
    ),
    "expert_shares": Fault(
        "experts' shares that do not sum to 1",
        "qwen3_moe layer 1 feed-forward",
        "rows",
        patched(ExpertsHalf, "__init__", _after_init(_unnormalised)),
    ),
    "one_norm": Fault(
        "a norm 1% too large in layer 1",
        "qwen2 rows",
        "layer 1 feed-forward",
        patched(layers, "build_parameters", _spoiled_norm),
    ),
    "clipping": Fault("gradients that are not clipped", "update", "update of", patched(AdamW, "step", _unclipped)),
    "random_numbers": Fault(
        "another step's random numbers", "generation", "by their random", patched(slots, "uniform", _other_numbers)
    ),
    "kl_sign": Fault("a KL term of the wrong sign", "two GRPO steps", "change of", _negative_kl),
    "learning_rate": Fault(
        "half of the learning rate", "learning curve", "mean absolute error", patched(AdamW, "step", _slow_learner)
    ),
}


def main(name: str, *words: str) -> int:
    """Run a command of `mindrlhf` with a fault."""
    from mindrlhf import cli
    from mindrlhf.backend.devices import DEVICES

    with injected(name, next(iter(DEVICES.values()))):
        return cli.main(words)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
