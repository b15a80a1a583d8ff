"""Vision tower: patches of images -> rows in place of their tokens' embeddings.

Images are padded to equal numbers of equal windows, so that one graph serves many of them. A block has two halves, each
composed or fused as those of the text's layers (`models.halves`); fused ones compute no padding. What lies before and
behind the blocks is composed.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from mindspore import Parameter, Tensor, nn, ops

from mindrlhf.backend.comm.graph_collectives import TensorParallel
from mindrlhf.backend.composed_attention import MASKED
from mindrlhf.backend.native.operators import ATTENTION_WEIGHTS, numbers_of
from mindrlhf.backend.operators import Operators, dtype_named
from mindrlhf.configs.vision import VisionConfig
from mindrlhf.models.halves import ALL_ROWS, FeedForwardHalf, Half
from mindrlhf.models.inputs import ANGLES, COS, COS_TABLE, SIN, SIN_TABLE, SPANS, VIEW
from mindrlhf.models.linear import Linear, Norm
from mindrlhf.models.parameter_spec import ParameterSpec
from mindrlhf.models.vision.positions import tower_angles
from mindrlhf.models.vision.rows import BLOCK, MERGER, PATCHES, TOWER
from mindrlhf.models.weight import Weight

EPSILON = 1e-6  # of the tower's RMSNorms, which configurations do not name
NO_INPUTS = ()  # of a layer, which linear maps read with dropout alone


@dataclass(frozen=True)
class TowerMaterials:
    """Inputs from which a part of the tower is built: see `halves.Materials`.

    prefix: the beginning of its names in `parameters`.
    """

    prefix: str
    parameters: Mapping[str, Parameter]
    operators: Operators
    adapters: Mapping[str, ParameterSpec]
    shards: TensorParallel = field(default_factory=TensorParallel)
    recompute: bool = False
    eps: float = EPSILON

    def linear(self, name: str) -> Linear:
        return Linear.of_map(f"{self.prefix}{name}", self.parameters, self.adapters, self.operators)

    def norm(self, name: str) -> Norm:
        weight = self.parameters[f"{self.prefix}{name}.weight"]
        return Norm(weight, self.eps, self.operators.composed.rms_norm)


class TowerAttention(Half):
    """Attention half of a block.

    It maps x [I * L, width] -> x + proj(attention(norm(x))).

    whole: patches attend to each other in the whole image, and not in a window.
    """

    def __init__(self, given: TowerMaterials, vision: VisionConfig, whole: bool):
        norm = given.norm("norm1")
        linears = {"wq": given.linear("attn.qkv"), "wk": None, "wv": None, "wo": given.linear("attn.proj")}
        others = {"norm": norm.weight, "q_norm": None, "k_norm": None}
        super().__init__("image_attention", ATTENTION_WEIGHTS, linears, others, given)
        self.norm = norm
        self.qkv = linears["wq"]
        self.proj = linears["wo"]
        self.eps = given.eps
        self.rotary = given.operators.rotary
        self.attend = given.operators.image_attention
        self.heads = vision.num_heads
        self.head_dim = vision.head_dim
        self.scale = vision.head_dim**-0.5
        self.whole = whole

    def construct(self, x, given, split):
        """Run the half.

        given: as of layers, with VIEW as float32[I, L]; split: (windows, patches of one, 0, 0).
        """
        windows, window, _, _ = split
        images, patches = given[VIEW].shape
        if self.fused:
            together = windows // images if self.whole else 1
            numbers = self.numbers(split, ALL_ROWS, self.head_dim, self.scale, together)
            angles = given[ANGLES]
            others = (given[COS_TABLE], given[SIN_TABLE], angles, angles, given[SPANS])
            return self.run_fused(x, (*others, numbers_of("HalfNumbers", numbers)))[0]
        span = patches if self.whole else window
        qkv = self.qkv(self.norm(x), given).reshape((x.shape[0], 3, self.heads, self.head_dim))
        shape = (1, x.shape[0], self.heads, self.head_dim)
        runs = (x.shape[0] // span, span, self.heads, self.head_dim)
        query = self.rotary(qkv[:, 0].astype("float32").reshape(shape), given[COS], given[SIN]).reshape(runs)
        key = self.rotary(qkv[:, 1].astype("float32").reshape(shape), given[COS], given[SIN]).reshape(runs)
        y = self.attend(query, key, qkv[:, 2].reshape(runs), given[VIEW].reshape(runs[:2]), self.scale)
        return x + self.proj(y.astype(x.dtype), given)


class TowerFeedForward(FeedForwardHalf):
    """Feed-forward half of a block, of its own names.

    It maps x [I * L, width] -> x + down(silu(gate(norm(x))) * up(norm(x))).
    """

    norm_name = "norm2"
    maps: Mapping[str, str] = {"w1": "mlp.gate_proj", "w3": "mlp.up_proj", "w2": "mlp.down_proj"}


class TowerBlock(nn.Cell):
    """Block of the two halves."""

    def __init__(self, given: TowerMaterials, vision: VisionConfig, whole: bool):
        super().__init__(auto_prefix=False)
        self.attention = TowerAttention(given, vision, whole)
        self.feed_forward = TowerFeedForward("feed_forward", given)

    def construct(self, x, given, split):
        return self.feed_forward(self.attention(x, given, split), given, split, ALL_ROWS)[0]


class Merger(nn.Cell):
    """Patches to tokens: each square of patches becomes one row of the text's width."""

    def __init__(self, given: TowerMaterials, vision: VisionConfig):
        super().__init__(auto_prefix=False)
        self.norm = given.norm("ln_q")
        self.first = given.linear("mlp.0")
        self.second = given.linear("mlp.2")
        self.width = vision.hidden_size * vision.merge_size**2

    def construct(self, x):
        h = self.first(self.norm(x).reshape((-1, self.width)), NO_INPUTS)
        # The exact GELU (Hendrycks & Gimpel 2016, arXiv:1606.08415); the approximation by tanh shows in the logits.
        return self.second(h * (ops.erf(h * 2**-0.5) + 1.0) * 0.5, NO_INPUTS)


class Tower(nn.Cell):
    """Tower over its parameters, which may be part of a larger model's.

    adapters: see `halves.Materials`. places: rows and columns of patches that have angles, at most.
    """

    def __init__(
        self,
        vision: VisionConfig,
        parameters: Mapping[str, Parameter],
        operators: Operators,
        adapters: Mapping[str, ParameterSpec],
        places: int = 1 << 14,
    ):
        super().__init__(auto_prefix=False)

        def materials(prefix: str) -> TowerMaterials:
            return TowerMaterials(f"{TOWER}{prefix}", parameters, operators, adapters)

        self.patches = Weight(parameters[f"{TOWER}{PATCHES}.weight"])
        self.width = vision.hidden_size
        self.window = vision.window_patches
        self.linear = operators.composed.linear
        self.dtype = dtype_named(operators.activations)
        whole = set(vision.full_attention_blocks)
        blocks = [TowerBlock(materials(BLOCK.format(i)), vision, i in whole) for i in range(vision.depth)]
        self.blocks = nn.CellList(blocks, auto_prefix=False)
        self.merger = Merger(materials(MERGER), vision)
        self.angles = Tensor(tower_angles(places, vision.head_dim).astype(np.float32))

    def construct(self, patches, places):
        """Compute the rows of images' tokens.

        patches: float32[I, L, numbers], padded windows (`windows.padded_places`); places: int32[I, L, 2], row and
        column of each patch, -1 for padding. Returns [I * L / merge^2, hidden], of padding anything finite.
        """
        return self.merger(self.hidden(patches, places)[-1])

    def hidden(self, patches, places):
        """Compute the patches' rows [I * L, width] behind the embedding and each block."""
        images, count, numbers = patches.shape
        real = places[:, :, 0] >= 0
        given = self._block_inputs(places, real)
        split = (images * count // self.window, self.window, 0, 0)
        weight, x = self.patches(patches.reshape((images * count, numbers)).astype(self.dtype))
        x = self.linear(x, weight.reshape((self.width, numbers)))
        out = (x,)
        for block in self.blocks:
            x = block(x, given, split)
            out += (x,)
        return out

    def _block_inputs(self, places, real):
        """Build the blocks' inputs, in the order of a layer's (`models.inputs`).

        places: int32[I, L, 2]; real: bool[I, L]. Each patch has its own row of the tables of angles.
        """
        numeric = real.astype("float32")
        mask = ops.select(real, ops.zeros_like(numeric), ops.full_like(numeric, MASKED))
        places = ops.select(places >= 0, places, ops.zeros_like(places)).reshape((-1,))
        angles = ops.gather(self.angles, places, 0).reshape((-1, 2 * self.angles.shape[1]))
        angles = ops.concat((angles, angles), -1)
        cos, sin = ops.cos(angles), ops.sin(angles)
        shape = (1, cos.shape[0], 1, cos.shape[1])
        rows = ops.arange(0, cos.shape[0]).astype("int32")
        spans = numeric.reshape((-1, self.window)).sum(-1).astype("int32")
        return cos.reshape(shape), sin.reshape(shape), mask, cos, sin, rows, (), spans
