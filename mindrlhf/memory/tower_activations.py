"""Activations of a vision tower's graphs in bytes, from shapes alone. Pure Python.

Factors are numbers for each padded patch, measured on CPU (`tests/helpers/tower_memory.py`). Of a composed tower
MindSpore repeats biases and weights of norms for all blocks before the first one runs, and attention has float32
scores, but where it keeps none. Blocks of a fused tower share memory in a forward pass, and keep little for a gradient.
"""

from dataclasses import dataclass
from math import prod

from mindrlhf.configs.model import ModelConfig
from mindrlhf.memory.activations import ITEMSIZE, TABLE, Stage
from mindrlhf.memory.graph_sizes import FUSED_TOWER_BLOCK, FUSED_TOWER_GRAPH, TOWER_BLOCKS, TOWER_GRAPH
from mindrlhf.memory.pictures import Padded, Pictures
from mindrlhf.models.parameters import tower_trains, trained_parts
from mindrlhf.phases import Kind
from mindrlhf.units import FLOAT32

INPUTS, FUSED_INPUTS = 2, 1.25  # copies of the patches
# Of a fused tower, of its width and of the inner width: in a forward pass, and kept of each block for a gradient.
FUSED_FORWARD, FUSED_UPDATE = (7.5, 1.6), (6, 2)
FUSED_LATEST = 3  # of the width, where the gradient begins
# Of a composed tower, in a forward pass, for each block: of the width in float32 and in the activations' dtype, and of
# the inner width.
FORWARD = (2, 7, 2.2)
# The same of an update, whose gradient keeps more.
UPDATE = (9, 9, 5.3)
SCORES, KEPT_SCORES = 3, 1.1  # in one block, and kept of each
LATEST_SCORES = 1.5  # where the gradient begins
MERGER, MERGER_UPDATE = 12, 13  # of the tower's width
# Numbers that kernels on CPU keep as long as a graph lives, of the tower's width: in a block, and in its gradient.
TABLES, UPDATE_TABLES, MERGER_TABLES = 7, 8, 4


@dataclass(frozen=True)
class TowerBatch:
    """Tower of a rank with a batch's pictures.

    padded: of one run of the tower. itemsize: bytes of an activation's number. scoreless, fused, rounds: see
    `activations.Stage`. taken: padded rows that the text's graph takes of a tower outside of it; None with the tower in
    the graph.
    """

    model: ModelConfig
    padded: Padded
    itemsize: int
    scoreless: bool = False
    taken: int | None = None
    fused: bool = False
    rounds: bool = False

    @classmethod
    def inside(cls, stage: Stage, padded: Padded) -> "TowerBatch":
        """Describe a tower in the graphs of a rank's text."""
        return cls(stage.model, padded, stage.itemsize, stage.scoreless, fused=stage.fused, rounds=stage.rounds)

    @classmethod
    def outside(cls, stage: Stage, pictures: Pictures, prompts: int) -> "TowerBatch":
        """Describe a tower that computes each picture of a batch alone."""
        padded = Padded(1, pictures.padded(1, stage.model.vision).patches)
        taken = pictures.padded_rows(prompts)
        return cls(stage.model, padded, stage.itemsize, stage.scoreless, taken, fused=stage.fused, rounds=stage.rounds)

    @property
    def goes_back(self) -> bool:
        """True if an update needs gradients within the blocks."""
        return self.taken is None and "vision" in trained_parts(self.model)

    @property
    def merger_moves(self) -> bool:
        """True if an update needs gradients of the merger."""
        return self.taken is None and tower_trains(self.model)

    @property
    def most_scores(self) -> int:
        """Numbers of attention scores for one patch, in the block with the most."""
        vision = self.model.vision
        if self.scoreless or self.fused:
            return 0
        whole = self.padded.patches if vision.whole_blocks else vision.window_patches
        return vision.num_heads * whole

    @property
    def all_scores(self) -> int:
        """Numbers of attention scores for one patch, in all blocks."""
        vision = self.model.vision
        if self.scoreless or self.fused:
            return 0
        windows = (vision.depth - vision.whole_blocks) * vision.window_patches
        return vision.num_heads * (vision.whole_blocks * self.padded.patches + windows)

    @property
    def output_bytes(self) -> int:
        """Bytes of the tower's rows, which the text's graph reads."""
        own = self.padded.rows // self.model.vision.merge_size**2
        return (own if self.taken is None else self.taken) * self.model.hidden_size * self.itemsize

    def _blocks(self, factors: tuple[float, float, float], fused: tuple[float, float], blocks: int) -> float:
        """Count the bytes that blocks have of one patch, without scores.

        factors: of composed blocks; fused: of fused ones, of which `blocks` have memory of their own.
        """
        vision = self.model.vision
        if self.fused:
            return blocks * FLOAT32 * (fused[0] * vision.hidden_size + fused[1] * vision.intermediate_size)
        attention, others, inner = factors
        width = vision.hidden_size
        numbers = (others * width + inner * vision.intermediate_size) * self.itemsize
        return vision.depth * (attention * width * FLOAT32 + numbers)

    def _ends(self, merger: int) -> int:
        """Count the bytes of one patch's inputs and of the merger."""
        vision = self.model.vision
        copies = FUSED_INPUTS if self.fused else INPUTS
        return int(copies * prod(vision.patch_shape) * FLOAT32) + merger * vision.hidden_size * self.itemsize

    @property
    def _rounded_bytes(self) -> int:
        """Bytes of the rounded factors of a fused feed-forward half: weights, inputs and slopes."""
        vision = self.model.vision
        width, inner = vision.hidden_size, vision.intermediate_size
        numbers = 3 * inner * width + self.padded.rows * (2 * inner + width)
        return ITEMSIZE["bfloat16"] * numbers if self.fused and self.rounds else 0

    @property
    def array_bytes(self) -> int:
        """Bytes of the text graph's patches or rows in host memory."""
        if self.taken is not None:
            return self.taken * self.model.hidden_size * FLOAT32
        return self.padded.rows * prod(self.model.vision.patch_shape) * FLOAT32

    @property
    def forward_bytes(self) -> int:
        """Peak bytes of a pass without gradients."""
        ends = 0 if self.fused else MERGER  # behind the blocks, whose memory is free then
        each = self._blocks(FORWARD, FUSED_FORWARD, 1) + SCORES * self.most_scores * FLOAT32 + self._ends(ends)
        return int(self.padded.rows * each) + self.output_bytes + self._rounded_bytes

    @property
    def kept_bytes(self) -> int:
        """Bytes that an update keeps while the text's layers run."""
        if not self.goes_back:
            kept = MERGER_UPDATE * self.model.vision.hidden_size * self.itemsize if self.merger_moves else 0
            return int(self.padded.rows * kept) + self.output_bytes
        scores = KEPT_SCORES * self.all_scores + LATEST_SCORES * self.most_scores
        ends = self._ends(MERGER_UPDATE + FUSED_LATEST * self.fused)
        each = self._blocks(UPDATE, FUSED_UPDATE, self.model.vision.depth) + scores * FLOAT32 + ends
        return int(self.padded.rows * each) + 2 * self.output_bytes + self._rounded_bytes

    def graph_bytes(self, kind: Kind) -> int:
        """Compute bytes of a graph on CPU, with the tables of its kernels."""
        vision = self.model.vision
        updates = kind == "update"
        goes_back = updates and self.goes_back
        if self.fused:
            merger = FLOAT32 * MERGER_TABLES * vision.hidden_size * (updates and self.merger_moves)
            return FUSED_TOWER_GRAPH[goes_back] + int(FUSED_TOWER_BLOCK * vision.depth) + self.padded.rows * merger
        numbers = vision.depth * vision.hidden_size * (TABLES + goes_back * UPDATE_TABLES)
        numbers += MERGER_TABLES * vision.hidden_size * (updates and self.merger_moves)
        tables = FLOAT32 * numbers + goes_back * TABLE * self.all_scores
        return TOWER_GRAPH + TOWER_BLOCKS[goes_back] * vision.depth + self.padded.rows * tables

    def peak_bytes(self, text: int, kind: Kind) -> int:
        """Compute peak bytes of a pass whose text has its own peak."""
        kept = self.kept_bytes if kind == "update" else self.output_bytes
        return max(text + kept, self.forward_bytes)
