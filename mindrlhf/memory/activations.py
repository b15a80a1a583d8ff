"""What compiled graphs hold beside parameters, in bytes, from shapes alone. Pure Python.

The counts follow the graphs of `models/decoder.py` as MindSpore's CPU backend runs them, tensor by tensor: what the
backward pass reads again (`kept`), and what is alive beside it where most is. A fused half of a layer
(`backend.native`) keeps its input and its projections, and makes again what is quickly made. Compositions
(`backend.cpu`) also keep what lies between, attention's probabilities above all, and tables: memory of kernels, outside
of the pool, that stays with its graph. CPU's element-wise kernels keep two 8-byte indices for each number of a
broadcast result, and two operators that MindSpore derives broadcast: the mean of a norm and the softmax, both going
backward. Ascend is counted as compositions: its fused operators keep less, so that the figures there are upper bounds,
and not measured.
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
    of the parallel regions are split. itemsize: bytes of an activation's number. fused: whether the kernels are those
    of `backend.native`. recompute: whether layers are computed again from their inputs.
    """

    model: ModelConfig
    tp: int
    layers: int
    is_last: bool
    sequence: bool
    itemsize: int
    fused: bool
    recompute: bool = False

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
    def fused_head(self) -> bool:
        """Whether the head's log-probs are fused: they read whole rows of logits."""
        return self.fused and self.tp == 1

    @property
    def head_rows(self) -> int:
        """Rows of the head's matrix here; 0 for a critic, which has one number for each token."""
        return 0 if self.model.value_head else self.model.vocab_size // self.tp

    @property
    def norm(self) -> int:
        """Tensors that a norm keeps: input and output; composed also scale, normed input and repeated weight."""
        return 2 if self.fused else 5

    @property
    def layer_norm(self) -> int:
        """The same of one inside of a half."""
        return 1 if self.fused else self.norm

    @property
    def gated(self) -> int:
        """Tensors of the inner width that are kept: gate, up; composed also the product and the sigmoid."""
        return 2 if self.fused else 4

    def near_probabilities(self, micro: Micro) -> int:
        """Attention probabilities of the responses in one layer, where they are held."""
        return 0 if self.fused else micro.near * self.heads * (micro.prefix + micro.response)

    def far_probabilities(self, rows: int, prefix: int) -> int:
        """Attention probabilities of `rows` of prompts in one layer, where they are held."""
        return 0 if self.fused else rows * self.heads * prefix

    def inside(self, rows: int) -> int:
        """Numbers of a half's input, which every rank has whole where operators are fused."""
        return rows * self.model.hidden_size if self.fused else self.outside(rows)

    def angles(self, rows: int, width: int) -> int:
        """cos and sin, repeated for each of the heads of `width` in all; fused operators read the table."""
        return 0 if self.fused else 2 * rows * width

    def logits(self, rows: int) -> int:
        """Numbers of one chunk of logits."""
        return rows // chunk_count(rows, self.head_rows) * self.head_rows if self.head_rows else 0


def update_kept(stage: Stage, micro: Micro) -> int:
    """Bytes that the forward pass of an update leaves to its backward pass."""
    rows, near = micro.rows, micro.near
    full = stage.layers - 1 if stage.is_last else stage.layers
    if stage.recompute:
        inputs = 2 * full * stage.inside(rows)  # of both halves
        behind = stage.inside(rows) + stage.inside(near) + stage.norm * stage.outside(near) + _kept_logits(stage, near)
        return (inputs + stage.is_last * behind) * stage.itemsize
    kept = full * _kept_of_layer(stage, micro) + stage.angles(rows, stage.query + stage.key)
    if stage.is_last:
        # Of the last layer's prompt only keys and values go on; behind it are the final norm and the logits.
        kept += stage.layer_norm * (stage.inside(rows) + stage.inside(near)) + stage.norm * stage.outside(near)
        kept += _kept_of_heads(stage, near, rows)
        kept += near * stage.gated * stage.inner + stage.angles(near, stage.query)
        kept += 0 if stage.fused else stage.outside(near)  # the rows of responses among all
        kept += 2 * stage.near_probabilities(micro) + _kept_logits(stage, near)
    return kept * stage.itemsize


def update_bytes(stage: Stage, micro: Micro, in_flight: int = 1) -> int:
    """Bytes of the pool where an update has most of it: where the backward pass begins.

    in_flight: micro-batches that a pipeline stage has begun and not finished, of which it keeps the input alone.
    """
    begins = _head_backward(stage, micro) if stage.is_last else 2 * stage.outside(micro.rows)
    if stage.fused:
        # Or in the last feed-forward half: gradients take the places of gate and up, beside them are the product, the
        # normed input and two gradients. The logits are gone by then, but where they were is hardly used.
        rows = micro.near if stage.is_last else micro.rows
        half = rows * stage.inner + 4 * stage.inside(rows)
        if stage.recompute:  # what the half made the first time, once more; much of it where the logits were
            half += stage.inside(rows) + 2 * rows * stage.inner
            half -= _kept_logits(stage, micro.near) if stage.is_last else 0
        begins = max(begins, half)
    else:
        # All layers' sigmoids of the gates are there again by then: they depend on nothing that comes later.
        begins += (stage.layers * micro.rows - (micro.far if stage.is_last else 0)) * stage.inner
    waiting = (in_flight - 1) * stage.outside(micro.rows) * 4  # NumPy arrays in float32
    return update_kept(stage, micro) + begins * stage.itemsize + waiting


def update_tables(stage: Stage, micro: Micro) -> int:
    """Bytes of the kernels' tables that an update's graph keeps: none of fused kernels."""
    if stage.fused:
        return 0
    layers, far = stage.layers, stage.far_probabilities(micro.far, micro.prefix)
    norms = 2 * layers * stage.outside(micro.rows)
    probabilities = layers * (stage.near_probabilities(micro) + far)
    if stage.is_last:
        norms -= stage.outside(micro.far) - stage.outside(micro.near)
        probabilities -= far
    return TABLE * (norms + probabilities)


def score_bytes(stage: Stage, micro: Micro) -> int:
    """Bytes of the pool where a pass without gradients has most of it: in a layer, or at the head."""
    layer = _alive_in_layer(stage, micro.rows, stage.near_probabilities(micro))
    head = 0
    if stage.is_last:
        head = (1 if stage.fused_head else 3) * stage.logits(micro.near) + stage.outside(micro.near)
    return max(layer, head) * stage.itemsize


def generate_bytes(stage: Stage, prompts: int, prefix: int, slots: int, positions: int) -> int:
    """Bytes of the pool where generation has most of it: prefilling `prompts` of `prefix` tokens, or a decode step.

    positions: of the cache, for each of its slots. What was prefilled stays while its samples are admitted, and is
    there twice while its heads are put in order.
    """
    rows = prompts * prefix
    filled = 2 * stage.layers * rows * stage.key
    prefill = _alive_in_layer(stage, rows, stage.far_probabilities(rows, prefix))
    scores = 0 if stage.fused else 3 * slots * stage.heads * positions
    decode = max(_alive_in_layer(stage, slots, 0) + scores, 4 * slots * stage.head_rows)
    return (filled + max(filled + prefill, decode)) * stage.itemsize


def _kept_of_layer(stage: Stage, micro: Micro) -> int:
    """Of one layer: its two norms; the heads; what the feed-forward multiplies. Composed, there are two copies of the
    responses' probabilities, because those of the prompt and their own go separate ways.
    """
    rows = micro.rows
    probabilities = 2 * stage.near_probabilities(micro) + stage.far_probabilities(micro.far, micro.prefix)
    heads = _kept_of_heads(stage, rows, rows) + probabilities
    return 2 * stage.layer_norm * stage.inside(rows) + heads + stage.gated * rows * stage.inner


def _kept_of_heads(stage: Stage, asking: int, rows: int) -> int:
    """Queries and attended values of the rows that ask, keys and values of all; of a norm on them, what it keeps beside
    its output.
    """
    normed = stage.norm - 1 if stage.model.qk_norm and not stage.fused else 0
    return (2 + normed) * (asking * stage.query + rows * stage.key)


def _kept_logits(stage: Stage, near: int) -> int:
    """Of one chunk; several are multiplied again."""
    return stage.logits(near) if stage.logits(near) == near * stage.head_rows else 0


def _head_backward(stage: Stage, micro: Micro) -> int:
    """Most numbers beside what was kept where the head goes backward.

    The gradient of the logits, or that of the head's matrix; of several chunks, that of the logits while the matrix's
    is added to the sum of the chunks before.
    """
    near = micro.near
    chunk, matrix = stage.logits(near), stage.head_rows * stage.model.hidden_size
    extra = 0 if stage.fused_head else chunk  # the composed softmax
    if chunk < near * stage.head_rows:
        return extra + chunk + 3 * matrix
    if stage.fused_head:  # the gradient of the logits takes their place
        return matrix + stage.outside(near)
    return max(2 * chunk, chunk + matrix)


def _alive_in_layer(stage: Stage, rows: int, probabilities: int) -> int:
    """Most numbers that a forward pass has at a time: in the feed-forward, or where the scores become probabilities."""
    if stage.fused:  # input and outputs of one half
        return 2 * stage.inside(rows) + rows * max(2 * stage.query + 3 * stage.key, 2 * stage.inner)
    attention = 3 * probabilities + rows * (2 * stage.query + 4 * stage.key)
    return 3 * stage.outside(rows) + max(3 * rows * stage.inner, attention)
