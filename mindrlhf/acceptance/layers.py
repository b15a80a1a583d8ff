"""Checks of one layer of each family, and of the head.

Each half of a layer, and the head: outputs, and the gradient of every parameter.
"""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from mindspore import Parameter, nn

from mindrlhf.acceptance.checks import TOLERANCES, Check, Finding, Trial, compared, tolerance_of
from mindrlhf.acceptance.float64 import Node, exp, gradients, log_softmax
from mindrlhf.acceptance.graphs import Collected, arrays_of, parameter, tensors
from mindrlhf.acceptance.inputs import batch_arrays, numbers, tiny_models, tiny_rows, tiny_weights, whole_numbers
from mindrlhf.acceptance.operators import operators_of
from mindrlhf.acceptance.reference import Reference, Rows
from mindrlhf.backend.operators import dtype_named
from mindrlhf.configs.lora import LAYERS
from mindrlhf.configs.model import ModelConfig
from mindrlhf.models.decoder import Decoder
from mindrlhf.models.halves import ALL_ROWS, Half
from mindrlhf.models.head import TokenLogProbs
from mindrlhf.models.initialize import build_parameters
from mindrlhf.models.parameters import parameter_table
from mindrlhf.models.weight import Weight

POSITIONS = 64  # of the rotary tables
TEMPERATURE = 0.8
TOKENS, WIDTH, VOCABULARY = 20, 64, 96  # of the head's check
HALVES = ("attention", "feed_forward")


def open_decoder(
    config: ModelConfig, weights: Mapping[str, np.ndarray], dtype: str, trial: Trial
) -> tuple[Decoder, dict[str, Parameter]]:
    """Build a decoder over its own copy of the weights."""
    parameters = build_parameters(parameter_table(config), lambda spec: weights[spec.name])
    return Decoder(config, parameters, operators_of(trial, dtype), POSITIONS), parameters


class _HalfProduct(nn.Cell):
    """Sum of a half's rows times slopes, and the rows."""

    def __init__(self, decoder: Decoder, half: Half, rows: Rows):
        super().__init__(auto_prefix=False)
        self.decoder = decoder
        self.half = half
        self.split = rows.split
        self.dtype = decoder.dtype

    def construct(self, x, slopes, *inputs):
        given = self.decoder.layer_inputs(inputs, self.split)
        out = self.half(x.astype(self.dtype), given, self.split, ALL_ROWS)[0].astype("float32")
        return (out * slopes).sum(), out


def check_half(family: str, layer: int, half: str, dtype: str, trial: Trial) -> Iterator[Finding]:
    """Check a half of a layer.

    Its rows, and the gradients of its input and parameters.
    """
    config = tiny_models()[family]
    weights = tiny_weights(config, family)
    rows = tiny_rows(family, config.vocab_size)
    name = f"{family} {layer} {half}"
    real = rows.real
    x = numbers(f"{name} rows", real.size, config.hidden_size) * real[:, None]
    slopes = numbers(f"{name} slopes", *x.shape) * real[:, None]
    model = Reference(config, weights)
    start = Node(x)
    attends = half == "attention"
    answer = model.attention_half(layer, start, rows) if attends else model.feed_forward_half(layer, start)
    decoder, parameters = open_decoder(config, weights, dtype, trial)
    chosen = getattr(decoder.layers[layer], half)
    own = [one for one in parameters.values() if _belongs(one.name, layer, attends)]
    graph = Collected(_HalfProduct(decoder, chosen, rows), own)
    _, out, d_x = arrays_of(graph(*tensors(x, slopes, *batch_arrays(rows))))
    tolerance = TOLERANCES[dtype]["layer"]
    yield compared("rows", out[real], answer.value[real], tolerance)
    expected = gradients(answer, slopes, [start, *(model[one.name] for one in own)])
    yield compared("gradient of the rows before", d_x[real], expected[0][real], tolerance)
    found = graph.gradients()
    for one, slope in zip(own, expected[1:], strict=True):
        yield compared(f"gradient of {one.name}", found[one.name], slope, tolerance_of(one.name, tolerance))


def _belongs(name: str, layer: int, attends: bool) -> bool:
    """Tell whether a parameter is of this half of the layer."""
    prefix = f"{LAYERS}{layer}."
    return name.startswith(prefix) and name.removeprefix(prefix).startswith("attention") == attends


class _Head(nn.Cell):
    """Sum of log-probs and entropies times slopes, and both."""

    def __init__(self, head: Parameter, token_log_probs: TokenLogProbs):
        super().__init__(auto_prefix=False)
        self.weight = Weight(head)
        self.token_log_probs = token_log_probs
        self.fused = token_log_probs.fused

    def construct(self, hidden, slopes, targets, used):
        if self.fused:
            out = self.token_log_probs(hidden, self.weight.parameter, targets, used, self.weight.collected)
        else:
            head, hidden = self.weight(hidden)
            out = self.token_log_probs(hidden, head, targets, used)
        return (out[0] * slopes[0] + out[1] * slopes[1]).sum(), out[0], out[1]


def check_head(chunks: int, dtype: str, trial: Trial) -> Iterator[Finding]:
    """Check the head: log-probs of targets and entropies, and their gradients."""
    used = operators_of(trial, dtype)
    hidden = numbers("head hidden", TOKENS, WIDTH)
    head = numbers("head weight", VOCABULARY, WIDTH, deviation=2 * WIDTH**-0.5)
    targets = whole_numbers("head targets", VOCABULARY, TOKENS)
    slopes = numbers("head slopes", 2, TOKENS)
    nodes = [Node(hidden), Node(head)]
    rows = log_softmax(nodes[0] @ nodes[1].T * (1.0 / TEMPERATURE))
    log_probs = rows[np.arange(TOKENS), targets]
    entropy = -(exp(rows) * rows).sum(1)
    expected = gradients((log_probs * slopes[0] + entropy * slopes[1]).sum(), 1.0, nodes)
    numbers_of_chunk = -(-TOKENS // chunks) * VOCABULARY
    cell = TokenLogProbs(TEMPERATURE, numbers_of_chunk, entropy_gradient=True, operators=used)
    weight = parameter("head.weight", head)
    graph = Collected(_Typed(_Head(weight, cell), used.activations), [weight])
    mask = np.ones(TOKENS, np.int32)
    _, *found, d_hidden = arrays_of(graph(*tensors(hidden, slopes, targets, mask)))
    tolerance = TOLERANCES[dtype]["layer"]
    yield compared("log-probs", found[0], log_probs.value, tolerance)
    yield compared("entropies", found[1], entropy.value, tolerance)
    yield compared("gradient of the hidden states", d_hidden, expected[0], tolerance)
    yield compared("gradient of the head", graph.gradients()[weight.name], expected[1], tolerance)


class _Typed(nn.Cell):
    """Cell whose first input has a dtype."""

    def __init__(self, cell: nn.Cell, dtype: str):
        super().__init__(auto_prefix=False)
        self.cell = cell
        self.dtype = dtype_named(dtype)

    def construct(self, x, *inputs):
        return self.cell(x.astype(self.dtype), *inputs)


def layer_checks(dtypes: Sequence[str]) -> Iterator[Check]:
    """List the checks of halves and of the head."""

    def of_half(family: str, layer: int, half: str, dtype: str):
        return lambda trial: check_half(family, layer, half, dtype, trial)

    def of_head(chunks: int, dtype: str):
        return lambda trial: check_head(chunks, dtype, trial)

    head = ("token_log_probs", "token_log_probs_gradient")
    for dtype in dtypes:
        for chunks in (1, 4):
            yield Check(f"head in {chunks} chunks {dtype}", "layer", of_head(chunks, dtype), head)
        for family, config in tiny_models().items():
            # One layer, and the first with experts, where there are any.
            for layer in sorted({0, *config.expert_layers[:1]}):
                for half in HALVES:
                    name = f"{family} layer {layer} {half.replace('_', '-')} {dtype}"
                    yield Check(name, "layer", of_half(family, layer, half, dtype), ("half",))
