"""Activations of compiled graphs in bytes, from shapes alone. Pure Python.

A half of a layer keeps its input and the projections that its backward pass reads; with recomputation, only its input.
Factors were measured on CPU with compositions and fused operators; Ascend is counted as compositions, an upper bound.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from mindrlhf.configs.model import ModelConfig
from mindrlhf.models.chunks import chunk_count
from mindrlhf.training.batch import MicroBatch

ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}  # on CPU all activations are float32
INT32 = 4
COMPOSED = 3  # compositions keep this many times the numbers of fused operators
TABLE = 16  # bytes that a composed kernel on CPU keeps for each number of a broadcast result


class Engine(NamedTuple):
    """Prompts prefilled at once, their padded tokens, slots and positions of the cache.

    packed: the cache holds bfloat16 numbers. routing: experts of a token over all layers, if they are recorded.
    """

    prompts: int
    prefix: int
    slots: int
    positions: int
    packed: bool = False
    routing: int = 0


@dataclass(frozen=True)
class Stage:
    """A rank's part of a model, as its graphs see it.

    tp: tensor-parallel ranks. ep: ranks over which experts are spread. layers: of this pipeline stage. is_last: it has
    the head. sequence: rows outside of the parallel regions are split. itemsize: bytes of an activation's number.
    fused: graphs have the kernels of `backend.native`. recompute: halves are recomputed from their inputs.
    in_blocks: composed layers are, each in graphs of its own. drops: adapters apply dropout to their inputs. rounds:
    fused operators round the factors of products into separate memory. scoreless: composed layers have no attention
    scores in memory. query, key, inner, vocabulary: this rank's widths of query heads, of key or value heads, of a
    feed-forward half, and of the head (0 for a critic).
    """

    model: ModelConfig
    tp: int
    layers: int
    is_last: bool
    sequence: bool
    itemsize: int
    fused: bool
    recompute: bool = False
    in_blocks: bool = False
    drops: bool = False
    rounds: bool = False
    scoreless: bool = False
    ep: int = 1

    @property
    def query(self) -> int:
        return self.model.num_heads // self.tp * self.model.head_dim

    @property
    def key(self) -> int:
        return max(1, self.model.num_kv_heads // self.tp) * self.model.head_dim

    @property
    def inner(self) -> int:
        model = self.model
        experts = {"moe_intermediate_size": model.num_experts_per_tok * self.ep}  # a row of each for a token
        return max(experts.get(name, 1) * size for name, size in model.inner_widths.items()) // self.tp

    @property
    def vocabulary(self) -> int:
        return 0 if self.model.value_head else self.model.vocab_size // self.tp

    def exchanged(self, rows: int) -> int:
        """Count the numbers of all ranks' rows, and of what experts make of them."""
        spread = self.ep > 1 and self.model.expert_layers
        return 2 * self.ep * rows * self.model.hidden_size if spread else 0

    def outside(self, rows: int) -> int:
        """Count the numbers of [rows, hidden] outside of the parallel regions."""
        return rows * self.model.hidden_size // (self.tp if self.sequence else 1)

    def inside(self, rows: int) -> int:
        """Count the numbers of a half's input, whole on every rank with fused operators."""
        return rows * self.model.hidden_size if self.fused else self.outside(rows)

    def probabilities(self, rows: int, positions: int) -> int:
        """Count attention probabilities in memory, for rows that each see `positions`."""
        return 0 if self.fused or self.scoreless else rows * self.model.num_heads // self.tp * positions

    def logits(self, rows: int) -> int:
        """Count the numbers of one chunk of logits."""
        return rows // chunk_count(rows, self.vocabulary) * self.vocabulary if self.vocabulary else 0

    @property
    def fused_head(self) -> bool:
        return self.fused and self.tp == 1

    def head(self, rows: int) -> int:
        """Count the numbers of a chunk of logits and, unless fused, of its softmax."""
        return self.logits(rows) * (1 if self.fused_head else 3)

    def kept(self, rows: int, near: int) -> int:
        """Count the numbers that a layer keeps; its attention half outputs only `near` rows."""
        inputs = self.inside(rows) + self.inside(near) + self.exchanged(near)
        projections = 2 * (rows * self.key + near * (self.query + self.inner))
        if self.recompute:
            return inputs
        return (inputs + projections) * (1 if self.fused else COMPOSED) + self.dropped(rows, near)

    def dropped(self, rows: int, near: int) -> int:
        """Count numbers of the seven maps' inputs after dropout, plus a byte for each."""
        width = self.model.hidden_size
        inputs = 2 * rows * width + near * (3 * width + self.query + self.inner)
        return inputs * (self.itemsize + 1) // self.itemsize if self.drops else 0

    def alive(self, rows: int, positions: int) -> int:
        """Count the most numbers that half a layer has during a forward pass."""
        widest = max(2 * self.inner, 2 * self.query + 3 * self.key)
        numbers = 2 * self.inside(rows) + self.exchanged(rows) + rows * widest
        return numbers if self.fused else numbers * 3 // 2 + 3 * self.probabilities(rows, positions)

    def rounded_bytes(self, rows: int) -> int:
        """Count the bytes of the largest operator's rounded factors.

        These factors are the weights, inputs and slopes of a feed-forward half or of the head.
        """
        width = self.model.hidden_size
        half = 3 * self.inner * width + rows * (2 * self.inner + width)
        head = (self.vocabulary + rows) * width if self.is_last else 0
        return ITEMSIZE["bfloat16"] * max(half, head) if self.rounds else 0


def update_bytes(stage: Stage, micro: MicroBatch, in_flight: int = 1) -> int:
    """Compute bytes of an update where its backward pass begins: kept numbers and gradients.

    in_flight: unfinished micro-batches of a pipeline stage, which keeps only the input of those that wait.
    """
    rows = micro.rows
    near = micro.response_rows
    of_near = 2 * stage.probabilities(near, micro.prefix_size + micro.response_size)
    of_far = stage.probabilities(micro.prompt_rows, micro.prefix_size)
    kept = (stage.layers - stage.is_last) * (stage.kept(rows, rows) + of_near + of_far)
    last = rows
    logits = 0
    first = 0
    if stage.is_last:
        last = near
        logits, first = _head_update(stage, near)
        kept += stage.kept(rows, near) + of_near + logits + 2 * stage.outside(near) * (1 if stage.fused else COMPOSED)
    # Otherwise the peak is in the last feed-forward half, which is recomputed after the logits are freed.
    again = stage.inside(last) + 2 * last * stage.inner - logits if stage.recompute else 0
    first = max(first, last * stage.inner + 4 * stage.inside(last) + again)
    waiting = (in_flight - 1) * stage.outside(rows) * 4  # NumPy arrays in float32
    return (kept + first) * stage.itemsize + waiting + stage.rounded_bytes(last)


def block_bytes(stage: Stage, micros: Sequence[MicroBatch], layers: int, update: bool) -> int:
    """Compute bytes of a pass by blocks (`training.block_passes`).

    They are the last block's, and the inputs of all. stage: has the layers of a block. layers: of the model. Each
    micro-batch waits for the others between blocks; in an update the inputs of all blocks and one gradient wait.
    """
    one = replace(stage, layers=1)
    kept = 4 * sum(stage.outside(micro.rows) for micro in micros)  # NumPy arrays in float32
    if update:
        return update_bytes(one, micros[0]) + kept * (layers + 1)
    return score_bytes(one, micros[0]) + kept * 2


def _head_update(stage: Stage, rows: int) -> tuple[int, int]:
    """Count logits that the head keeps, and peak numbers that its backward pass adds."""
    chunk = stage.logits(rows)
    own = stage.model.text_trains and not stage.fused_head  # else there is no such matrix, or it is the buffer's
    matrix = stage.vocabulary * stage.model.hidden_size if own else 0
    if chunk < rows * stage.vocabulary:  # a chunk is freed once the next one exists
        return 0, stage.head(rows) + (chunk if stage.fused_head else 3 * matrix)
    return chunk, stage.head(rows) - chunk + matrix + stage.outside(rows)


def update_tables(stage: Stage, micro: MicroBatch) -> int:
    """Compute bytes of the tables that composed kernels keep for norms and probabilities.

    Forward graphs of blocks keep half as many again.
    """
    if stage.fused:
        return 0
    seen = stage.probabilities(micro.response_rows, micro.prefix_size + micro.response_size)
    seen += stage.probabilities(micro.prompt_rows, micro.prefix_size)
    tables = TABLE * ((2 * stage.layers + 1) * stage.outside(micro.rows) + stage.layers * seen)
    return tables * 3 // 2 if stage.in_blocks else tables


def score_bytes(stage: Stage, micro: MicroBatch) -> int:
    """Compute peak bytes of a pass without gradients, in a layer or the head."""
    layer = stage.alive(micro.rows, micro.prefix_size + micro.response_size)
    head = stage.head(micro.response_rows) + stage.outside(micro.response_rows)
    return max(layer, head if stage.is_last else 0) * stage.itemsize + stage.rounded_bytes(micro.rows)


def cache_bytes(stage: Stage, engine: Engine) -> int:
    """Compute bytes of an engine's key-value cache, and of its cache of the routing."""
    itemsize = ITEMSIZE["bfloat16"] if engine.packed else stage.itemsize
    position = 2 * stage.layers * stage.key * itemsize + engine.routing * INT32
    return engine.slots * engine.positions * position


def generate_bytes(stage: Stage, engine: Engine) -> int:
    """Compute bytes of generation at its peak: prefilling prompts, or a decode step.

    Prefilled keys and values stay in memory while their samples are admitted, and exist twice while their heads are
    reordered.
    """
    rows = engine.prompts * engine.prefix
    filled = 2 * stage.layers * rows * stage.key
    prefill = filled + stage.alive(rows, engine.prefix)
    decode = max(stage.alive(engine.slots, engine.positions), 4 * engine.slots * stage.vocabulary)
    return (filled + max(prefill, decode)) * stage.itemsize + stage.rounded_bytes(rows)
