"""Activations of a vision tower's graphs in bytes, from shapes alone. Pure Python.

Factors are numbers for each padded patch, measured on CPU (`tests/helpers/tower_memory.py`). The tower is composed, but
for its attention where that keeps no scores, and biases and weights of norms are repeated for all blocks before the
first one runs. Composed attention is in float32.
"""

from dataclasses import dataclass
from math import prod

from mindrlhf.configs.model import ModelConfig
from mindrlhf.memory.activations import TABLE, Stage
from mindrlhf.memory.graph_sizes import TOWER_BLOCKS, TOWER_GRAPH
from mindrlhf.memory.pictures import Padded, Pictures
from mindrlhf.models.parameters import tower_trains, trained_parts
from mindrlhf.phases import Kind
from mindrlhf.units import FLOAT32

INPUTS = 2  # copies of the patches
# Of a forward pass, for each block: of the tower's width in float32 and in the activations' dtype, of the inner width.
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

    padded: of one run of the tower. itemsize: bytes of an activation's number. scoreless: see `activations.Stage`.
    taken: padded rows that the text's graph takes of a tower outside of it; None with the tower in the graph.
    """

    model: ModelConfig
    padded: Padded
    itemsize: int
    scoreless: bool = False
    taken: int | None = None

    @classmethod
    def inside(cls, stage: Stage, padded: Padded) -> "TowerBatch":
        """Describe a tower in the graphs of a rank's text."""
        return cls(stage.model, padded, stage.itemsize, stage.scoreless)

    @classmethod
    def outside(cls, stage: Stage, pictures: Pictures, prompts: int) -> "TowerBatch":
        """Describe a tower that computes each picture of a batch alone."""
        padded = Padded(1, pictures.padded(1, stage.model.vision).patches)
        return cls(stage.model, padded, stage.itemsize, stage.scoreless, pictures.padded_rows(prompts))

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
        if self.scoreless:
            return 0
        whole = self.padded.patches if vision.whole_blocks else vision.window_patches
        return vision.num_heads * whole

    @property
    def all_scores(self) -> int:
        """Numbers of attention scores for one patch, in all blocks."""
        vision = self.model.vision
        if self.scoreless:
            return 0
        windows = (vision.depth - vision.whole_blocks) * vision.window_patches
        return vision.num_heads * (vision.whole_blocks * self.padded.patches + windows)

    @property
    def output_bytes(self) -> int:
        """Bytes of the tower's rows, which the text's graph reads."""
        own = self.padded.rows // self.model.vision.merge_size**2
        return (own if self.taken is None else self.taken) * self.model.hidden_size * self.itemsize

    def _blocks(self, factors: tuple[float, float, float]) -> float:
        """Count the bytes that all blocks have of one patch, without scores."""
        vision = self.model.vision
        attention, others, inner = factors
        width = vision.hidden_size
        numbers = (others * width + inner * vision.intermediate_size) * self.itemsize
        return vision.depth * (attention * width * FLOAT32 + numbers)

    def _ends(self, merger: int) -> int:
        """Count the bytes of one patch's inputs and of the merger."""
        vision = self.model.vision
        return INPUTS * prod(vision.patch_shape) * FLOAT32 + merger * vision.hidden_size * self.itemsize

    @property
    def array_bytes(self) -> int:
        """Bytes of the text graph's patches or rows in host memory."""
        if self.taken is not None:
            return self.taken * self.model.hidden_size * FLOAT32
        return self.padded.rows * prod(self.model.vision.patch_shape) * FLOAT32

    @property
    def forward_bytes(self) -> int:
        """Peak bytes of a pass without gradients."""
        each = self._blocks(FORWARD) + SCORES * self.most_scores * FLOAT32 + self._ends(MERGER)
        return int(self.padded.rows * each) + self.output_bytes

    @property
    def kept_bytes(self) -> int:
        """Bytes that an update keeps while the text's layers run."""
        if not self.goes_back:
            kept = MERGER_UPDATE * self.model.vision.hidden_size * self.itemsize if self.merger_moves else 0
            return int(self.padded.rows * kept) + self.output_bytes
        scores = KEPT_SCORES * self.all_scores + LATEST_SCORES * self.most_scores
        each = self._blocks(UPDATE) + scores * FLOAT32 + self._ends(MERGER_UPDATE)
        return int(self.padded.rows * each) + 2 * self.output_bytes

    def graph_bytes(self, kind: Kind) -> int:
        """Compute bytes of a graph on CPU, with the tables of its kernels."""
        vision = self.model.vision
        updates = kind == "update"
        goes_back = updates and self.goes_back
        numbers = vision.depth * vision.hidden_size * (TABLES + goes_back * UPDATE_TABLES)
        numbers += MERGER_TABLES * vision.hidden_size * (updates and self.merger_moves)
        tables = FLOAT32 * numbers + goes_back * TABLE * self.all_scores
        return TOWER_GRAPH + TOWER_BLOCKS[goes_back] * vision.depth + self.padded.rows * tables

    def peak_bytes(self, text: int, kind: Kind) -> int:
        """Compute peak bytes of a pass whose text has its own peak."""
        kept = self.kept_bytes if kind == "update" else self.output_bytes
        return max(text + kept, self.forward_bytes)
