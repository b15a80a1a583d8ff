"""Vision tower: patches of images -> rows in place of their tokens' embeddings.

Images are padded to equal numbers of equal windows, so that one graph serves many of them. Built from operators with a
gradient (`Operators.composed`).
"""

from collections.abc import Mapping

import numpy as np
from mindspore import Parameter, Tensor, nn, ops

from mindrlhf.backend.composed_attention import MASKED
from mindrlhf.backend.operators import Operators, dtype_named
from mindrlhf.configs.vision import VisionConfig
from mindrlhf.models.halves import Linear, LowRank, Norm
from mindrlhf.models.parameter_spec import ParameterSpec
from mindrlhf.models.vision.positions import tower_angles
from mindrlhf.models.vision.rows import BLOCK, MERGER, PATCHES, TOWER
from mindrlhf.models.weight import Weight

EPSILON = 1e-6  # of the tower's RMSNorms, which configurations do not name
NO_INPUTS = ()  # inputs of a layer that its linear maps read with dropout alone


class _Parts:
    """Builder of the tower's linear maps and norms from parameters by name."""

    def __init__(
        self, parameters: Mapping[str, Parameter], operators: Operators, adapters: Mapping[str, ParameterSpec]
    ):
        self.parameters = parameters
        self.operators = operators.composed
        self.adapters = adapters

    def linear(self, name: str) -> Linear:
        name = f"{TOWER}{name}"
        weight = Weight(self.parameters[f"{name}.weight"])
        adapter = LowRank.of_map(name, self.parameters, self.adapters, self.operators)
        return Linear(weight, self.parameters[f"{name}.bias"], adapter, self.operators)

    def norm(self, name: str) -> Norm:
        return Norm(self.parameters[f"{TOWER}{name}.weight"], EPSILON, self.operators.rms_norm)


class TowerBlock(nn.Cell):
    """Pre-norm block: x + attention(norm(x)), then x + down(silu(gate(norm(x))) * up(norm(x))).

    span: patches that attend to each other, a whole image or a window.
    """

    def __init__(self, name: str, vision: VisionConfig, parts: _Parts, whole: bool):
        super().__init__(auto_prefix=False)
        self.attention_norm = parts.norm(f"{name}norm1")
        self.qkv = parts.linear(f"{name}attn.qkv")
        self.proj = parts.linear(f"{name}attn.proj")
        self.feed_forward_norm = parts.norm(f"{name}norm2")
        self.gate = parts.linear(f"{name}mlp.gate_proj")
        self.up = parts.linear(f"{name}mlp.up_proj")
        self.down = parts.linear(f"{name}mlp.down_proj")
        self.rotary = parts.operators.rotary
        self.swiglu = parts.operators.swiglu
        self.attend = parts.operators.image_attention
        self.heads = vision.num_heads
        self.head_dim = vision.head_dim
        self.scale = vision.head_dim**-0.5
        self.whole = whole
        self.window = (vision.window_side * vision.merge_size) ** 2

    def construct(self, x, cos, sin, mask):
        """Run on x [I * L, width].

        There are L padded patches of each of I images. cos, sin: [1, I * L, 1, head_dim]; mask: float32[I, L], added to
        the scores of the patches as keys.
        """
        span = mask.shape[1] if self.whole else self.window
        qkv = self.qkv(self.attention_norm(x), NO_INPUTS).reshape((x.shape[0], 3, self.heads, self.head_dim))
        shape = (1, x.shape[0], self.heads, self.head_dim)
        runs = (x.shape[0] // span, span, self.heads, self.head_dim)
        query = self.rotary(qkv[:, 0].astype("float32").reshape(shape), cos, sin).reshape(runs)
        key = self.rotary(qkv[:, 1].astype("float32").reshape(shape), cos, sin).reshape(runs)
        y = self.attend(query, key, qkv[:, 2].reshape(runs), mask.reshape(runs[:2]), self.scale)
        x = x + self.proj(y.astype(x.dtype), NO_INPUTS)
        h = self.feed_forward_norm(x)
        return x + self.down(self.swiglu(self.gate(h, NO_INPUTS), self.up(h, NO_INPUTS)), NO_INPUTS)


class Merger(nn.Cell):
    """Patches to tokens: each square of patches becomes one row of the text's width."""

    def __init__(self, vision: VisionConfig, parts: _Parts):
        super().__init__(auto_prefix=False)
        self.norm = parts.norm(f"{MERGER}ln_q")
        self.first = parts.linear(f"{MERGER}mlp.0")
        self.second = parts.linear(f"{MERGER}mlp.2")
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
        parts = _Parts(parameters, operators, adapters)
        self.patches = Weight(parameters[f"{TOWER}{PATCHES}.weight"])
        self.width = vision.hidden_size
        self.linear = parts.operators.linear
        self.dtype = dtype_named(operators.activations)
        whole = set(vision.full_attention_blocks)
        self.blocks = nn.CellList(
            [TowerBlock(BLOCK.format(i), vision, parts, i in whole) for i in range(vision.depth)], auto_prefix=False
        )
        self.merger = Merger(vision, parts)
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
        cos, sin = self._rotary(ops.select(places >= 0, places, ops.zeros_like(places)))
        numeric = real.astype("float32")
        mask = ops.select(real, ops.zeros_like(numeric), ops.full_like(numeric, MASKED))
        weight, x = self.patches(patches.reshape((images * count, numbers)).astype(self.dtype))
        x = self.linear(x, weight.reshape((self.width, numbers)))
        out = (x,)
        for block in self.blocks:
            x = block(x, cos, sin, mask)
            out += (x,)
        return out

    def _rotary(self, places):
        """Look up cos and sin [1, patches, 1, head_dim] at int32[I, L, 2]."""
        angles = ops.gather(self.angles, places.reshape((-1,)), 0).reshape((-1, 2 * self.angles.shape[1]))
        angles = ops.concat((angles, angles), -1)
        shape = (1, -1, 1, angles.shape[-1])
        return ops.cos(angles).reshape(shape), ops.sin(angles).reshape(shape)
