"""What compiled graphs hold beside parameters, in bytes, from shapes alone. Pure Python.

The counts follow the graphs of `models/transformer.py` as MindSpore's CPU backend runs them, tensor by tensor: what the
backward pass reads again (`kept`), and what is alive beside it where most is. Tables are memory of kernels, outside of
the pool, that stays with its graph: CPU's element-wise kernels keep two 8-byte indices for each number of a broadcast
result, and two operators that MindSpore derives broadcast: the mean of a norm and the softmax, both going backward.
Fused operators on Ascend keep less; there the figures are upper bounds, and not measured.
"""

from dataclasses import dataclass

from mindrlhf.configs.model import ModelConfig
from mindrlhf.models.chunks import chunk_count

ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}
TABLE = 16  # bytes of a broadcast number's indices


@dataclass(frozen=True)
class Micro:
    """A micro-batch's padded sizes: prompts N, samples G of each, prompt tokens P, response tokens R."""

    prompts: int
    samples: int
    prefix: int
    response: int

    @property
    def far(self) -> int:
        """Rows of prompts."""
        return self.prompts * self.prefix

    @property
    def near(self) -> int:
        """Rows of responses."""
        return self.prompts * self.samples * self.response

    @property
    def rows(self) -> int:
        return self.far + self.near


@dataclass(frozen=True)
class Stage:
    """A rank's part of a model, as its graphs see it.

    tp: tensor-parallel ranks. layers: of this pipeline stage. is_last: whether the head is here. sequence: rows outside
    of the parallel regions are split. itemsize: bytes of an activation's number.
    """

    model: ModelConfig
    tp: int
    layers: int
    is_last: bool
    sequence: bool
    itemsize: int

    def outside(self, rows: int) -> int:
        """Numbers of [rows, hidden] outside of the parallel regions."""
        return rows * self.model.hidden_size // (self.tp if self.sequence else 1)

    @property
    def heads(self) -> int:
        return self.model.num_heads // self.tp

    @property
    def query(self) -> int:
        """Width of the query heads here."""
        return self.heads * self.model.head_dim

    @property
    def key(self) -> int:
        """Width of the key heads here, and of the value heads."""
        return max(1, self.model.num_kv_heads // self.tp) * self.model.head_dim

    @property
    def inner(self) -> int:
        """Width of the feed-forward layer here."""
        return self.model.intermediate_size // self.tp

    @property
    def head_rows(self) -> int:
        """Rows of the head's matrix here; 0 for a critic, which has one number for each token."""
        return 0 if self.model.value_head else self.model.vocab_size // self.tp

    def probabilities(self, micro: Micro) -> int:
        """Attention probabilities of the responses in one layer."""
        return micro.near * self.heads * (micro.prefix + micro.response)

    def logits(self, rows: int) -> int:
        """Numbers of one chunk of logits."""
        return rows // chunk_count(rows, self.head_rows) * self.head_rows if self.head_rows else 0


def update_kept(stage: Stage, micro: Micro) -> int:
    """Bytes that the forward pass of an update leaves to its backward pass."""
    full = stage.layers - 1 if stage.is_last else stage.layers
    kept = full * _kept_of_layer(stage, micro) + _angles(stage, micro.rows)
    if stage.is_last:
        # Of the last layer's prompt only keys and values go on; behind it are the final norm and the logits.
        near, width = micro.near, stage.model.hidden_size
        kept += 5 * stage.outside(micro.rows) + near * (width + 4 * stage.inner + 2 * stage.query)
        kept += 2 * micro.rows * stage.key + 2 * stage.probabilities(micro) + 10 * stage.outside(near)
        kept += 2 * near * stage.query
        if stage.logits(near) == near * stage.head_rows:
            kept += stage.logits(near)
    return kept * stage.itemsize


def update_bytes(stage: Stage, micro: Micro, in_flight: int = 1) -> int:
    """Bytes of the pool where an update has most of it: where the backward pass begins.

    All layers' sigmoids of the gates are there again by then, because they depend on nothing that comes later.
    in_flight: micro-batches that a pipeline stage has begun and not finished, of which it keeps the input alone.
    """
    if stage.is_last:
        chunk, matrix = stage.logits(micro.near), stage.head_rows * stage.model.hidden_size
        head = max(2 * chunk, chunk + matrix)
    else:
        head = 2 * stage.outside(micro.rows)
    gates = stage.layers * micro.rows - (micro.far if stage.is_last else 0)
    waiting = (in_flight - 1) * stage.outside(micro.rows) * 4  # NumPy arrays in float32
    return update_kept(stage, micro) + (head + gates * stage.inner) * stage.itemsize + waiting


def update_tables(stage: Stage, micro: Micro) -> int:
    """Bytes of the kernels' tables that an update's graph keeps."""
    layers = stage.layers
    norms = 2 * layers * stage.outside(micro.rows)
    probabilities = layers * (stage.probabilities(micro) + micro.far * stage.heads * micro.prefix)
    if stage.is_last:
        norms -= stage.outside(micro.far) - stage.outside(micro.near)
        probabilities -= micro.far * stage.heads * micro.prefix
    return TABLE * (norms + probabilities)


def score_bytes(stage: Stage, micro: Micro) -> int:
    """Bytes of the pool where a pass without gradients has most of it: in a layer, or at the head."""
    layer = _alive_in_layer(stage, micro.rows, stage.probabilities(micro))
    head = 3 * stage.logits(micro.near) + stage.outside(micro.near) if stage.is_last else 0
    return max(layer, head) * stage.itemsize


def generate_bytes(stage: Stage, prompts: int, prefix: int, slots: int, positions: int) -> int:
    """Bytes of the pool where generation has most of it: prefilling `prompts` of `prefix` tokens, or a decode step.

    positions: of the cache, for each of its slots. What was prefilled stays while its samples are admitted.
    """
    rows = prompts * prefix
    filled = 2 * stage.layers * rows * stage.key
    prefill = _alive_in_layer(stage, rows, rows * stage.heads * prefix)
    scores = 3 * slots * stage.heads * positions
    decode = max(_alive_in_layer(stage, slots, 0) + scores, 4 * slots * stage.head_rows)
    return (filled + max(prefill, decode)) * stage.itemsize


def _kept_of_layer(stage: Stage, micro: Micro) -> int:
    """Of one layer: two norms with input, scale, normed input, weight and output; the heads; what the feed-forward
    multiplies. Of the responses' probabilities two copies, because those of the prompt and their own go separate ways.
    """
    rows, outside = micro.rows, stage.outside(micro.rows)
    heads = 2 * rows * (stage.query + stage.key)  # scaled query, attended values, key, value
    probabilities = 2 * stage.probabilities(micro) + micro.far * stage.heads * micro.prefix
    return 10 * outside + heads + probabilities + 4 * rows * stage.inner


def _angles(stage: Stage, rows: int) -> int:
    """cos and sin, repeated for the query heads and the key heads: once for all layers."""
    return 2 * rows * (stage.query + stage.key)


def _alive_in_layer(stage: Stage, rows: int, probabilities: int) -> int:
    """Most numbers that a forward pass has at a time: in the feed-forward, or where the scores become probabilities."""
    stream = 3 * stage.outside(rows)
    attention = 3 * probabilities + rows * (2 * stage.query + 4 * stage.key)
    return stream + max(3 * rows * stage.inner, attention)
