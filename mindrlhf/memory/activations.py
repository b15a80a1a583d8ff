"""Activations of compiled graphs in bytes, from shapes alone. Pure Python.

A half of a layer keeps its input and the projections that its backward pass reads; recomputed, only its input. The
factors were measured on MindSpore's CPU backend. Fused operators (`backend.native`) compute cheap tensors again;
compositions (`backend.composed`) keep them, attention's probabilities above all. Ascend is counted as compositions:
upper bounds, not measured.
"""

from dataclasses import dataclass

from mindrlhf.configs.model import ModelConfig
from mindrlhf.models.chunks import chunk_count
from mindrlhf.training.batch import MicroBatch

ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}
TABLE = 16  # bytes that a composed kernel on CPU keeps for each number of a broadcast result


@dataclass(frozen=True)
class Stage:
    """A rank's part of a model, as its graphs see it.

    tp: tensor-parallel ranks. layers: of this pipeline stage. is_last: the head is here. sequence: rows outside
    of the parallel regions are split. itemsize: bytes of an activation's number. fused: the kernels are those
    of `backend.native`. recompute: halves are computed again from their inputs.
    """

    model: ModelConfig
    tp: int
    layers: int
    is_last: bool
    sequence: bool
    itemsize: int
    fused: bool
    recompute: bool = False

    @property
    def query(self) -> int:
        """Width of the query heads here."""
        return self.model.num_heads // self.tp * self.model.head_dim

    @property
    def key(self) -> int:
        """Width of the key heads here, and of the value heads."""
        return max(1, self.model.num_kv_heads // self.tp) * self.model.head_dim

    @property
    def inner(self) -> int:
        """Width of the feed-forward half here."""
        return self.model.intermediate_size // self.tp

    @property
    def vocabulary(self) -> int:
        """Rows of the head's matrix here; 0 for a critic.

        A critic has one number for each token.
        """
        return 0 if self.model.value_head else self.model.vocab_size // self.tp

    def outside(self, rows: int) -> int:
        """Numbers of [rows, hidden] outside of the parallel regions."""
        return rows * self.model.hidden_size // (self.tp if self.sequence else 1)

    def inside(self, rows: int) -> int:
        """Numbers of a half's input, whole on every rank with fused operators."""
        return rows * self.model.hidden_size if self.fused else self.outside(rows)

    def probabilities(self, rows: int, positions: int) -> int:
        """Attention probabilities of rows that each see `positions`, where they are held."""
        return 0 if self.fused else rows * self.model.num_heads // self.tp * positions

    def logits(self, rows: int) -> int:
        """Numbers of one chunk of logits."""
        return rows // chunk_count(rows, self.vocabulary) * self.vocabulary if self.vocabulary else 0

    def attention_kept(self, rows: int, asking: int, probabilities: int) -> int:
        """Numbers that an attention half keeps.

        They are its input; queries and attended values, keys and values.
        """
        projected = 2 * (asking * self.query + rows * self.key)
        if self.recompute:
            return self.inside(rows)
        if self.fused:
            return self.inside(rows) + projected
        return 5 * self.outside(rows) + (3 if self.model.qk_norm else 1) * projected + probabilities

    def feed_forward_kept(self, rows: int) -> int:
        """Numbers that a feed-forward half keeps: its input, gate and up.

        A composed half also keeps two products and the norm.
        """
        if self.recompute:
            return self.inside(rows)
        return self.inside(rows) + 2 * rows * self.inner if self.fused else 5 * (self.outside(rows) + rows * self.inner)

    def layer_alive(self, rows: int, probabilities: int) -> int:
        """Most numbers of a forward pass in one half of a layer."""
        if self.fused:
            return 2 * self.inside(rows) + rows * max(2 * self.query + 3 * self.key, 2 * self.inner)
        attention = 3 * probabilities + rows * (2 * self.query + 4 * self.key)
        return 3 * self.outside(rows) + max(3 * rows * self.inner, attention)


def update_bytes(stage: Stage, micro: MicroBatch, in_flight: int = 1) -> int:
    """Bytes of an update at its peak, where the backward pass begins.

    They are the kept numbers of all halves, and the first gradients.
    in_flight: micro-batches that a pipeline stage has begun and not finished, of which it keeps the input alone.
    """
    rows, near = micro.rows, micro.response_rows
    # The rotation's angles of each head; fused operators read the table.
    kept = 0 if stage.fused else 2 * (rows + near) * (stage.query + stage.key)
    of_near = 2 * stage.probabilities(near, micro.prefix_size + micro.response_size)
    of_far = stage.probabilities(micro.prompt_rows, micro.prefix_size)
    full = stage.layers - stage.is_last
    kept += full * (stage.attention_kept(rows, rows, of_near + of_far) + stage.feed_forward_kept(rows))
    first, last_rows = 2 * stage.outside(rows), rows
    if stage.is_last:  # of the last layer's prompts only keys and values go on
        head, first = _head_update(stage, near)
        kept += stage.attention_kept(rows, near, of_near) + stage.feed_forward_kept(near) + head
        last_rows = near
    if stage.fused:  # or in the last feed-forward half, when the logits are gone
        again = stage.inside(last_rows) + 2 * last_rows * stage.inner - _whole_logits(stage, near) * stage.is_last
        half = last_rows * stage.inner + 4 * stage.inside(last_rows) + (again if stage.recompute else 0)
        first = max(first, half)
    waiting = (in_flight - 1) * stage.outside(rows) * 4  # NumPy arrays in float32
    return (kept + first) * stage.itemsize + waiting


def _head_update(stage: Stage, near: int) -> tuple[int, int]:
    """Numbers that the head keeps, and the most that its backward pass adds.

    These are gradients of logits and of its matrix.
    """
    chunk, whole = stage.logits(near), _whole_logits(stage, near)
    matrix, fused = stage.vocabulary * stage.model.hidden_size, stage.fused and stage.tp == 1
    kept = (2 if stage.fused else 5) * stage.outside(near) + whole
    if not whole:  # several chunks, whose gradients of the matrix are summed
        return kept, chunk + 3 * matrix + (0 if fused else chunk)
    return kept, matrix + stage.outside(near) if fused else chunk + max(chunk, matrix)


def _whole_logits(stage: Stage, rows: int) -> int:
    """Numbers of one-chunk logits; several chunks are multiplied again."""
    return stage.logits(rows) if stage.logits(rows) == rows * stage.vocabulary else 0


def update_tables(stage: Stage, micro: MicroBatch) -> int:
    """Bytes of the tables that composed kernels of an update keep on CPU.

    The tables are those of norms and of probabilities.
    """
    if stage.fused:
        return 0
    seen = stage.probabilities(micro.response_rows, micro.prefix_size + micro.response_size)
    seen += stage.probabilities(micro.prompt_rows, micro.prefix_size)
    return TABLE * ((2 * stage.layers + 1) * stage.outside(micro.rows) + stage.layers * seen)


def score_bytes(stage: Stage, micro: MicroBatch) -> int:
    """Peak bytes of a pass without gradients, in a layer or the head."""
    near = micro.response_rows
    layer = stage.layer_alive(micro.rows, stage.probabilities(near, micro.prefix_size + micro.response_size))
    head = (1 if stage.fused and stage.tp == 1 else 3) * stage.logits(near) + stage.outside(near)
    return max(layer, head if stage.is_last else 0) * stage.itemsize


def generate_bytes(stage: Stage, prompts: int, prefix: int, slots: int, positions: int) -> int:
    """Bytes of generation at its peak.

    The peak is prefilling `prompts` of `prefix` tokens, or a decode step.
    positions: of the cache, for each of its slots. Prefilled keys and values stay while their samples are admitted, and
    are there twice while their heads are put in order.
    """
    rows = prompts * prefix
    filled = 2 * stage.layers * rows * stage.key
    prefill = stage.layer_alive(rows, stage.probabilities(rows, prefix))
    decode = max(stage.layer_alive(slots, stage.probabilities(slots, positions)), 4 * slots * stage.vocabulary)
    return (filled + max(filled + prefill, decode)) * stage.itemsize
