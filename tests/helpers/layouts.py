"""Hypothesis strategies for layouts, and shards of real arrays: for the tests of layouts, plans and their executors."""

from dataclasses import replace
from math import lcm, prod

import numpy as np
from hypothesis import strategies as st

from mindrlhf.configs.lora import Adapter
from mindrlhf.configs.model import ModelConfig
from mindrlhf.parallel.layout import Layout, Placement, Sharding, model_layout
from mindrlhf.parallel.mesh import Mesh

EXPERTS = 4


def spreads(config: ModelConfig) -> st.SearchStrategy[int]:
    """Numbers of ranks over which experts can be spread."""
    return st.sampled_from([ranks for ranks in (1, 2, EXPERTS) if ranks == 1 or config.num_experts])


@st.composite
def model_configs(draw, max_tp: int = 4, layers: int = 3) -> ModelConfig:
    """A small model that every number of tensor-parallel ranks up to `max_tp` divides."""
    unit = lcm(*range(1, max_tp + 1))
    experts = {"num_experts": EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": unit}
    return ModelConfig(
        **draw(st.sampled_from([{}, {"family": "qwen3_moe"} | experts])),
        vocab_size=unit * draw(st.integers(1, 2)),
        hidden_size=unit,
        intermediate_size=unit * draw(st.integers(1, 2)),
        num_layers=draw(st.integers(1, layers)),
        num_heads=unit,
        num_kv_heads=draw(st.sampled_from([kv for kv in range(1, unit + 1) if divides_all(kv, unit, max_tp)])),
        head_dim=2,
        attention_bias=draw(st.booleans()),
        qk_norm=draw(st.booleans()),
        tie_word_embeddings=draw(st.booleans()),
        adapter=draw(st.sampled_from([None, Adapter(2, 4), Adapter(3, 4, exclude_modules=("k_proj", "down_proj"))])),
    )


def divides_all(kv: int, heads: int, max_tp: int) -> bool:
    return heads % kv == 0 and all(kv % tp == 0 or tp % kv == 0 for tp in range(1, max_tp + 1))


@st.composite
def offsets(draw, layers: int, stages: int) -> tuple[int, ...]:
    """How layers may lie on stages: at least one on each of the middle ones."""
    spare = layers - max(0, stages - 2)
    ends = sorted(draw(st.lists(st.integers(0, spare), min_size=stages - 1, max_size=stages - 1)))
    counts = [stop - start for start, stop in zip([0, *ends], [*ends, spare], strict=True)]
    counts = [count + (0 < stage < stages - 1) for stage, count in enumerate(counts)]
    return tuple(count - layers // stages for count in counts)


@st.composite
def model_layouts(draw, config: ModelConfig, max_tp: int = 4, max_dp: int = 3) -> Layout:
    """Any layout of a model."""
    pp = draw(st.integers(1, min(3, config.num_layers)))
    ep = draw(spreads(config))
    mesh = Mesh(dp=draw(st.integers(1, max_dp if ep == 1 else 1)), tp=draw(st.integers(1, max_tp)), pp=pp, ep=ep)
    offset = draw(offsets(config.num_layers, pp)) if pp > 1 else 0
    return model_layout(config, mesh, offset=offset, vocab_emb_dp=draw(st.booleans()))


@st.composite
def grids(draw, ranks: int) -> tuple[int, ...]:
    """Lengths of axes with the product `ranks`."""
    grid = []
    while ranks > 1 and draw(st.booleans()):
        grid.append(draw(st.sampled_from([length for length in range(1, ranks + 1) if ranks % length == 0])))
        ranks //= grid[-1]
    return (*grid, ranks)


@st.composite
def shardings(draw, ranks: int, dims: int) -> Sharding:
    """Any way to cut a tensor, several axes on one dimension and in any order included."""
    grid = draw(grids(ranks))
    cuts = [[] for _ in range(dims)]
    for axis in draw(st.permutations(range(len(grid)))):
        dim = draw(st.integers(-1, dims - 1))
        if dim >= 0:
            cuts[dim].append(axis)
    return Sharding(grid, tuple(map(tuple, cuts)))


@st.composite
def layout_pairs(draw) -> tuple[Layout, Layout]:
    """Two layouts of the same made-up tensors, on any numbers of ranks, cut in ways that need not fit one another."""
    ranks = [draw(st.sampled_from((1, 2, 3, 4, 6))) for _ in range(2)]
    stages = [draw(st.integers(1, 3)) for _ in range(2)]
    placements = [{}, {}]
    for index in range(draw(st.integers(1, 3))):
        dims = draw(st.integers(0, 3))
        chosen = [
            {
                stage: draw(shardings(count, dims))
                for stage in draw(st.sets(st.integers(0, total - 1), min_size=1).map(sorted))
            }
            for count, total in zip(ranks, stages, strict=True)
        ]
        parts = [sharding.parts for side in chosen for sharding in side.values()]
        shape = tuple(lcm(*(each[dim] for each in parts)) * draw(st.integers(1, 2)) for dim in range(dims))
        for side, places in zip(chosen, placements, strict=True):
            places[f"p{index}"] = Placement(shape, side)
    return tuple(Layout(s, r, p) for s, r, p in zip(stages, ranks, placements, strict=True))


@st.composite
def on_some_ranks(draw, layout: Layout, most: int = 40) -> Layout:
    """The same layout on any ranks below `most`."""
    ranks = draw(st.sets(st.integers(0, most - 1), min_size=layout.size, max_size=layout.size))
    return replace(layout, ranks=tuple(sorted(ranks)))


def full_arrays(layout: Layout) -> dict[str, np.ndarray]:
    """Every element of every parameter different."""
    start, arrays = 0, {}
    for name, shape in layout.shapes.items():
        arrays[name] = np.arange(start, start + prod(shape), dtype=np.float32).reshape(shape)
        start += prod(shape)
    return arrays


def shards_of(layout: Layout, arrays: dict[str, np.ndarray]) -> list[dict[str, np.ndarray]]:
    """For every rank of the layout in order, name -> what it holds."""
    return [{name: arrays[name][part] for name, part in layout.shards(rank)} for rank in layout.ranks]


def assembled(layout: Layout, shards: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """The inverse of `shards_of`; where several ranks hold a part they hold the same bits."""
    arrays = {}
    for name, shape in layout.shapes.items():
        whole, seen = np.zeros(shape, np.float32), np.zeros(shape, bool)
        for rank, held in zip(layout.ranks, shards, strict=True):
            part = layout.slices(rank, name)
            if part is None:
                continue
            np.testing.assert_array_equal(whole[part][seen[part]], held[name][seen[part]], err_msg=name)
            whole[part], seen[part] = held[name], True
        assert seen.all(), name
        arrays[name] = whole
    return arrays
