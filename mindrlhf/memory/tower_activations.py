"""Activations of a vision tower's graphs in bytes, from shapes alone. Pure Python.

Factors are numbers for each padded patch, measured on CPU (`tests/helpers/tower_memory.py`). The tower is composed on
every device, and biases and weights of norms are repeated for all blocks before the first one runs. Attention is in
float32.
"""

from dataclasses import dataclass
from math import prod

from mindrlhf.configs.model import ModelConfig
from mindrlhf.memory.activations import TABLE
from mindrlhf.memory.pictures import Padded
from mindrlhf.models.parameters import trained_parts
from mindrlhf.units import FLOAT32

INPUTS = 2  # copies of the patches
# Of a forward pass, for each block: of the tower's width in float32 and in the activations' dtype, of the inner width.
FORWARD = (4, 12, 2.2)
# The same of an update, whose gradient keeps more.
UPDATE = (12, 13, 5.3)
SCORES, KEPT_SCORES = 3, 1.1  # in one block, and kept of each
LATEST_SCORES = 1.5  # where the gradient begins
MERGER, MERGER_UPDATE = 12, 13  # of the tower's width
TABLES, MERGER_TABLES = 2, 1  # norms of a block, and of the merger


@dataclass(frozen=True)
class TowerBatch:
    """Tower of a rank with a batch's pictures. itemsize: bytes of an activation's number."""

    model: ModelConfig
    padded: Padded
    itemsize: int

    @property
    def goes_back(self) -> bool:
        """True if an update needs gradients within the blocks."""
        return "vision" in trained_parts(self.model)

    @property
    def merger_moves(self) -> bool:
        """True if an update needs gradients of the merger."""
        return bool(trained_parts(self.model) & {"vision", "merger"})

    @property
    def most_scores(self) -> int:
        """Numbers of attention scores for one patch, in the block with the most."""
        vision = self.model.vision
        whole = self.padded.patches if vision.whole_blocks else vision.window_patches
        return vision.num_heads * whole

    @property
    def all_scores(self) -> int:
        """Numbers of attention scores for one patch, in all blocks."""
        vision = self.model.vision
        windows = (vision.depth - vision.whole_blocks) * vision.window_patches
        return vision.num_heads * (vision.whole_blocks * self.padded.patches + windows)

    @property
    def output_bytes(self) -> int:
        """Bytes of the tower's rows, which the text's graph reads."""
        return self.padded.rows // self.model.vision.merge_size**2 * self.model.hidden_size * self.itemsize

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
        """Bytes of the patches in host memory."""
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

    @property
    def table_bytes(self) -> int:
        """Bytes of an update's tables, which kernels on CPU keep."""
        width = self.model.vision.hidden_size
        numbers = MERGER_TABLES * width if self.merger_moves else 0
        if self.goes_back:
            numbers += TABLES * self.model.vision.depth * width + self.all_scores
        return TABLE * self.padded.rows * numbers

    def update_bytes(self, text: int) -> int:
        """Peak bytes of an update whose text has its own peak."""
        return max(text + self.kept_bytes, self.forward_bytes)

    def pass_bytes(self, text: int) -> int:
        """Peak bytes of a pass without gradients whose text has its own peak."""
        return max(text + self.output_bytes, self.forward_bytes)
