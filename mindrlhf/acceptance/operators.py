"""Checks of single operators, forward and backward, in each dtype."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from mindspore import Parameter, ParameterTuple, Tensor, nn, ops

from mindrlhf import backend
from mindrlhf.acceptance import reference
from mindrlhf.acceptance.checks import TOLERANCES, Check, Finding, Trial, compared, same_bits
from mindrlhf.acceptance.float64 import Node, gradients
from mindrlhf.acceptance.graphs import Call, Once, ThereAndBack, arrays_of, parameter, tensors
from mindrlhf.acceptance.inputs import COMPLETIONS, PROMPTS, SPLIT, exact, numbers
from mindrlhf.acceptance.rounded_moments import check_rounded_adamw
from mindrlhf.backend.compile.graph import Graph
from mindrlhf.backend.composed_attention import MASKED
from mindrlhf.backend.operators import Operators, dtype_named
from mindrlhf.training.optimizer import Apply, SquaredNorm

NORM_EPSILON = 1e-6
ROWS, INPUTS, OUTPUTS = 24, 64, 48
KEY_HEADS, QUERY_HEADS, HEAD = 2, 4, 16
SCALE = HEAD**-0.5
SLOTS, CACHE = 3, 32
PLACES = (5, 0, 31)  # of the new position in each slot's cache

Cell = Callable[[Operators], nn.Cell]


@dataclass(frozen=True)
class Case:
    """One operator with inputs and its answer in float64.

    name: of the list, or with a form behind it. cell: the operator's call. inputs: float32 by name, of which gradients
    are checked. answer: on the inputs as nodes. others: further inputs. counts: rows of the output that are defined.
    """

    name: str
    cell: Cell
    inputs: Mapping[str, np.ndarray]
    answer: Callable[..., Node]
    others: Sequence[np.ndarray] = ()
    counts: np.ndarray | None = None

    @property
    def operator(self) -> str:
        return self.name.partition(" ")[0]


def operators_of(trial: Trial, dtype: str) -> Operators:
    return trial.device.operators(dtype)


def check_case(case: Case, dtype: str, trial: Trial) -> Iterator[Finding]:
    """Compare a case's output and gradients."""
    used = operators_of(trial, dtype)
    nodes = {name: Node(array) for name, array in case.inputs.items()}
    answer = case.answer(*nodes.values())
    slopes = numbers(f"{case.name} slopes", *answer.shape)
    if case.counts is not None:
        slopes = slopes * case.counts.reshape(-1, *(1,) * (slopes.ndim - 1))
    graph = ThereAndBack(case.cell(used), used.activations, len(nodes))
    found = arrays_of(graph(*tensors(slopes, *case.inputs.values(), *case.others)))
    tolerance = TOLERANCES[dtype]["operators"]
    kept = slice(None) if case.counts is None else case.counts
    yield compared("output", found[0][kept], answer.value[kept], tolerance)
    slopes_of = gradients(answer, slopes, list(nodes.values()))
    for name, own, expected in zip(nodes, found[1:], slopes_of, strict=True):
        yield compared(f"gradient of {name}", own, expected, tolerance)


class GroupAttention(nn.Cell):
    """Attention of a grouped batch, with its view."""

    def __init__(self, operators: Operators, split: reference.Split):
        super().__init__(auto_prefix=False)
        self.view = operators.group_view
        self.attend = operators.group_attention
        self.split = split

    def construct(self, query, key, value, prefix_lengths, lengths):
        view = self.view(prefix_lengths, lengths, self.split, KEY_HEADS, QUERY_HEADS)
        return self.attend(query, key, value, view, self.split, SCALE)


def plain_cases() -> Iterator[Case]:
    """Yield the operators on rows."""
    x = numbers("x", ROWS, INPUTS)
    weight = numbers("weight", OUTPUTS, INPUTS, deviation=INPUTS**-0.5)
    yield Case("linear", lambda of: Call(of.composed.linear), {"x": x, "weight": weight}, lambda a, b: a @ b.T)
    yield Case(
        "linear_bias",
        lambda of: Call(of.linear_bias),
        {"x": x, "weight": weight, "bias": numbers("bias", OUTPUTS)},
        lambda a, b, c: a @ b.T + c,
    )
    yield Case(
        "rms_norm",
        lambda of: Call(of.rms_norm, NORM_EPSILON),
        {"x": x, "weight": exact(numbers("norm", INPUTS, deviation=0.2) + 1)},
        lambda a, b: reference.rms_norm(a, b, NORM_EPSILON),
    )
    yield Case(
        "swiglu",
        lambda of: Call(of.swiglu),
        {"gate": x, "up": numbers("up", ROWS, INPUTS)},
        reference.swiglu,
    )
    angles = np.arange(ROWS)[:, None] * 10.0 ** -np.linspace(0, 3, HEAD // 2)
    cos, sin = (exact(np.tile(part, (1, 2))).reshape(1, ROWS, 1, HEAD) for part in (np.cos(angles), np.sin(angles)))
    halves = (cos.reshape(ROWS, HEAD)[:, : HEAD // 2], sin.reshape(ROWS, HEAD)[:, : HEAD // 2])
    yield Case(
        "rotary",
        lambda of: _Rotary(of),
        {"x": numbers("heads", 1, ROWS, QUERY_HEADS, HEAD)},
        lambda a: reference.rotary(a.reshape(ROWS, QUERY_HEADS, HEAD), *halves).reshape(1, ROWS, QUERY_HEADS, HEAD),
        others=(cos, sin),
    )


class _Rotary(nn.Cell):
    def __init__(self, operators: Operators):
        super().__init__(auto_prefix=False)
        self.rotary = operators.rotary

    def construct(self, x, cos, sin):
        return self.rotary(x, cos, sin)


def attention_cases() -> Iterator[Case]:
    """Yield the attention of grouped batches.

    Prompts alone, whole batches, and completions as queries alone.
    """
    n, p, g, r = SPLIT
    before = n * p
    count = before + n * g * r
    real = reference.Rows(SPLIT, (PROMPTS, COMPLETIONS), np.zeros(0), np.zeros(0)).real
    lengths = (np.array(PROMPTS, np.int32), np.array(COMPLETIONS, np.int32))
    key, value = (numbers(f"attention {part}", count, KEY_HEADS, HEAD) for part in ("key", "value"))
    query = numbers("attention query", count, QUERY_HEADS, HEAD)

    def answer(q: Node, k: Node, v: Node) -> Node:
        return reference.group_attention(q, k, v, SPLIT, (PROMPTS, COMPLETIONS), SCALE)

    def of_completions(q: Node, k: Node, v: Node) -> Node:
        padded = reference.concat([Node(np.zeros((before, QUERY_HEADS, HEAD))), q])
        return answer(padded, k, v)[before:]

    def of_prompts(q: Node, k: Node, v: Node) -> Node:
        return reference.group_attention(q, k, v, (n, p, 0, 0), (PROMPTS, ()), SCALE)

    whole = {"query": query, "key": key, "value": value}
    yield Case("group_attention", lambda of: GroupAttention(of, SPLIT), whole, answer, lengths, real)
    yield Case(
        "group_attention completions",
        lambda of: GroupAttention(of, SPLIT),
        {**whole, "query": query[before:]},
        of_completions,
        lengths,
        real[before:],
    )
    alone = {name: array[:before] for name, array in whole.items()}
    prompts = (lengths[0], lengths[0])
    yield Case(
        "group_attention prompts",
        lambda of: GroupAttention(of, (n, p, 0, 0)),
        alone,
        of_prompts,
        prompts,
        real[:before],
    )


class _ImageAttention(nn.Cell):
    def __init__(self, operators: Operators):
        super().__init__(auto_prefix=False)
        self.attend = operators.composed.image_attention

    def construct(self, query, key, value, mask):
        return self.attend(query, key, value, mask, SCALE)


def image_cases() -> Iterator[Case]:
    """Yield the attention of images: without padding, with some, of nothing else."""
    real = np.ones((3, 16), bool)
    real[1, 5:9] = real[1, 14:] = real[2] = False
    shape = (*real.shape, QUERY_HEADS, HEAD)
    arrays = {part: numbers(f"image {part}", *shape) for part in ("query", "key", "value")}

    def answer(q: Node, k: Node, v: Node) -> Node:
        seen = [np.tile(keys, (len(keys), 1)) for keys in real[:2]]
        whole = [reference.attention(q[run], k[run], v[run], seen[run], SCALE) for run in range(2)]
        return reference.concat([*whole, Node(np.zeros((real.shape[1], QUERY_HEADS * HEAD)))])

    mask = np.where(real, 0, MASKED).astype(np.float32)
    yield Case("image_attention", _ImageAttention, arrays, answer, (mask,), real.ravel())


class _Decode(nn.Cell):
    """Attention of one new position of each slot, and the caches afterwards."""

    def __init__(self, operators: Operators, caches: Sequence[Parameter], dtype: str):
        super().__init__(auto_prefix=False)
        self.view = operators.decode_view
        self.attend = operators.decode_attention
        self.keys, self.values = caches
        self.dtype = dtype_named(dtype)

    def construct(self, query, key, value, places):
        view = self.view(places, KEY_HEADS, CACHE)
        new = (query.astype(self.dtype), key.astype(self.dtype), value.astype(self.dtype))
        out = self.attend(*new, self.keys, self.values, view, SCALE)
        return out, ops.depend(self.keys, out) * 1.0, ops.depend(self.values, out) * 1.0


def check_decoding(dtype: str, trial: Trial) -> Iterator[Finding]:
    """Check `decode_attention`: what it returns, and what it writes."""
    used = operators_of(trial, dtype)
    shape = (SLOTS, KEY_HEADS, CACHE, HEAD)
    caches = {name: numbers(f"cache {name}", *shape) for name in ("keys", "values")}
    held = [parameter(f"acceptance.{name}", array, used.activations) for name, array in caches.items()]
    query = numbers("decode query", SLOTS, QUERY_HEADS, HEAD)
    key, value = (numbers(f"decode {name}", SLOTS, KEY_HEADS, HEAD) for name in ("key", "value"))
    places = np.array(PLACES, np.int32)
    graph = Once(_Decode(used, held, used.activations))
    found = arrays_of(graph(*tensors(query, key, value, places)))
    expected = []
    for slot, place in enumerate(PLACES):
        for cache, new in zip(caches.values(), (key, value), strict=True):
            cache[slot, :, place] = new[slot]
        keys, values = (Node(cache[slot, :, : place + 1]).transpose((1, 0, 2)) for cache in caches.values())
        seen = np.ones((1, place + 1), bool)
        expected.append(reference.attention(Node(query[slot][None]), keys, values, seen, SCALE).value[0])
    yield compared("output", found[0], np.stack(expected), TOLERANCES[dtype]["operators"])
    for name, own in zip(caches, found[1:], strict=True):
        yield same_bits(f"{name} in the cache", own, caches[name])


class _Admit(Graph):
    def __init__(self, operators: Operators, caches: Sequence[Parameter], longest: int, dtype: str):
        super().__init__("acceptance")
        self.admit = operators.admit
        self.caches = ParameterTuple(caches)
        self.longest = longest
        self.dtype = dtype_named(dtype)

    def construct(self, slots, rows, first, second):
        prefilled = (first.astype(self.dtype), second.astype(self.dtype))
        return self.admit(slots, rows, self.longest, prefilled, self.caches).astype("float32")


class _Read(nn.Cell):
    """Values of parameters, as a graph sees them."""

    def __init__(self, parameters: Sequence[Parameter]):
        super().__init__(auto_prefix=False)
        self.parameters = ParameterTuple(parameters)

    def construct(self, one):
        found = ()
        for held in self.parameters:
            found += (held * one.astype(held.dtype),)
        return found


def seen_by_graph(parameters: Sequence[Parameter]) -> list[np.ndarray]:
    """Read parameters through a graph: float32."""
    return arrays_of(Once(_Read(parameters))(Tensor(np.float32(1))))


def check_admission(dtype: str, trial: Trial) -> Iterator[Finding]:
    """Check `admit`.

    Two prefilled prompts go to slots 2 and 0, and slot 1 stays.
    """
    used = operators_of(trial, dtype)
    longest = 8
    slots = np.array([2, 0], np.int32)
    rows = np.array([0, 1], np.int32)
    prefilled = [numbers(f"prefilled {name}", 2, KEY_HEADS, longest, HEAD) for name in ("keys", "values")]
    before = [numbers(f"admitted {name}", SLOTS, KEY_HEADS, CACHE, HEAD) for name in ("keys", "values")]
    held = [parameter(f"acceptance.{i}", array, used.activations) for i, array in enumerate(before)]
    graph = _Admit(used, held, longest, used.activations)
    arrays_of(graph(*tensors(slots, rows, *prefilled)))
    for name, own, earlier, new in zip(("keys", "values"), seen_by_graph(held), before, prefilled, strict=True):
        yield same_bits(f"{name} of the prompts", own[slots, :, :longest], new[rows])
        yield same_bits(f"{name} of another slot", own[1], earlier[1])


class _Logits(nn.Cell):
    """Products of the head without a gradient.

    Those of generation, if the device has its own, else `linear`.
    """

    def __init__(self, operators: Operators):
        super().__init__(auto_prefix=False)
        self.linear = operators.linear
        self.decode_logits = operators.decode_logits if operators.fused else operators.linear
        self.dtype = operators.activations

    def construct(self, x, head):
        x = x.astype(self.dtype)
        return self.linear(x, head), self.decode_logits(x, head)


def check_logits(dtype: str, trial: Trial) -> Iterator[Finding]:
    """Check the products of the head."""
    x = numbers("x", ROWS, INPUTS)
    head = numbers("head", OUTPUTS, INPUTS, deviation=INPUTS**-0.5)
    graph = Once(_Logits(operators_of(trial, dtype)))
    found = arrays_of(graph(*tensors(x, head)))
    expected = x.astype(np.float64) @ head.astype(np.float64).T
    for part, own in zip(("of updates", "of decode steps"), found, strict=True):
        yield compared(part, own, expected, TOLERANCES[dtype]["operators"])


def check_norm(dtype: str, trial: Trial) -> Iterator[Finding]:
    """Check `squared_norm` over arrays of different shapes."""
    arrays = [numbers(f"norm of {i}", *shape) for i, shape in enumerate([(5, 64), (48,), (3, 2, 16)])]
    held = ParameterTuple([parameter(f"acceptance.{i}", array) for i, array in enumerate(arrays)])
    found = SquaredNorm(held, operators_of(trial, dtype))()
    expected = sum((array.astype(np.float64) ** 2).sum() for array in arrays)
    yield compared("sum", found.asnumpy().reshape(()), expected, TOLERANCES["float32"]["operators"])


def check_adamw(dtype: str, trial: Trial) -> Iterator[Finding]:
    """Check `adamw`.

    Weights, moments and zeroed gradients, with decay and without, whole and of some rows.
    """
    decays = [True, False, True]
    shapes = [(4, 64), (48,), (2, 64)]
    rows = [(0, 4), (0, 48), (1, 3)]  # of the third only two rows of the gradient belong to the parameter
    rate, beta1, beta2, eps, decay, factor = 0.01, 0.9, 0.99, 1e-3, 0.1, 0.5
    kinds = ("weight", "gradient", "first", "second")
    drawn = {kind: [numbers(f"adamw {kind} {i}", *shape) for i, shape in enumerate(shapes)] for kind in kinds}
    drawn["second"] = [exact(array**2) for array in drawn["second"]]
    drawn["gradient"][2] = numbers("adamw gradient", 4, 64)
    held = {
        kind: ParameterTuple([parameter(f"acceptance.{kind}.{i}", array) for i, array in enumerate(arrays)])
        for kind, arrays in drawn.items()
    }
    graph = Apply(
        parameters=held["weight"],
        gradients=held["gradient"],
        first=held["first"],
        second=held["second"],
        decays=decays,
        rows=rows,
        adamw=operators_of(trial, dtype).adamw,
    )
    arrays_of(graph(*(Tensor(np.float32(number)) for number in (rate, beta1, beta2, eps, decay, factor))))
    tolerance = TOLERANCES["float32"]["operators"]
    for i, (first, end) in enumerate(rows):
        weight, gradient, one, two = (drawn[kind][i].astype(np.float64) for kind in kinds)
        gradient = gradient[first:end] * factor
        one = beta1 * one + (1 - beta1) * gradient
        two = beta2 * two + (1 - beta2) * gradient**2
        weight = weight - rate * (one / (np.sqrt(two) + eps) + decay * decays[i] * weight)
        for kind, expected in (("weight", weight), ("first", one), ("second", two)):
            yield compared(f"{kind} {i}", backend.read(held[kind][i]), expected, tolerance)
        yield same_bits(f"gradient {i}", backend.read(held["gradient"][i]), np.zeros(drawn["gradient"][i].shape))


# Operators that are checked alone without a gradient -> their checks.
FORWARD: Mapping[str, Callable[[str, Trial], Iterator[Finding]]] = {
    "decode_logits": check_logits,
    "decode_attention": check_decoding,
    "admit": check_admission,
    "squared_norm": check_norm,
    "adamw": check_adamw,
    "rounded_adamw": check_rounded_adamw,
}
VIEWS = {"group_attention": "group_view", "decode_attention": "decode_view"}


def operator_checks(dtypes: Sequence[str]) -> Iterator[Check]:
    """List the checks of single operators."""

    def of_case(case: Case, dtype: str) -> Callable[[Trial], Iterator[Finding]]:
        return lambda trial: check_case(case, dtype, trial)

    def of_check(check: Callable[[str, Trial], Iterator[Finding]], dtype: str) -> Callable[[Trial], Iterator[Finding]]:
        return lambda trial: check(dtype, trial)

    for dtype in dtypes:
        for case in (*plain_cases(), *attention_cases(), *image_cases()):
            covers = (case.operator, *([VIEWS[case.operator]] if case.operator in VIEWS else ()))
            yield Check(f"{case.name} {dtype}", "operators", of_case(case, dtype), covers)
        for name, check in FORWARD.items():
            covers = (name, *([VIEWS[name]] if name in VIEWS else ()))
            yield Check(f"{name} {dtype}", "operators", of_check(check, dtype), covers)
