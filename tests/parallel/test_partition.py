"""A rank's part of a model: what it holds, whose gradients are summed, and that no sum waits for another."""

from collections import deque
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from layouts import model_configs, offsets, spreads
from stacked import STACK, stacked_config

from mindrlhf.models.parameters import parameter_table
from mindrlhf.parallel.layout import model_layout, split_layers
from mindrlhf.parallel.mesh import Mesh
from mindrlhf.parallel.partition import Partition


@st.composite
def jobs(draw) -> list[Partition]:
    """The parts of all ranks of a job."""
    model = draw(model_configs())
    pp = draw(st.integers(1, min(3, model.num_layers)))
    ep = draw(spreads(model))
    mesh = Mesh(dp=draw(st.integers(1, 3 if ep == 1 else 2)), tp=draw(st.integers(1, 4)), pp=pp, ep=ep)
    offset = draw(offsets(model.num_layers, pp)) if pp > 1 else 0
    layout = model_layout(model, mesh, offset=offset, vocab_emb_dp=draw(st.booleans()))
    sequence = draw(st.booleans())
    stages = split_layers(model.num_layers, pp, offset)
    return [
        Partition(model, mesh, layout, stages[mesh.coordinates(rank).pp], rank, sequence) for rank in range(mesh.size)
    ]


@given(jobs())
def test_each_element_counts_once_in_every_replica(parts):
    mesh = parts[0].mesh
    for spec in parameter_table(parts[0].model):
        for dp in range(mesh.dp):
            counted = np.zeros(spec.shape, int)
            for part in parts:
                if part.coordinates.dp == dp and spec in part.specs and part.counts(spec):
                    counted[part.slices(spec)] += 1
            assert (counted == 1).all()


@settings(max_examples=40)
@given(jobs())
def test_the_ranks_of_a_sum_hold_the_same_part_and_agree_on_the_group(parts):
    groups = cache(lambda rank, spec: parts[rank].gradient_group(spec))
    for part in parts:
        for spec in part.specs:
            group = groups(part.rank, spec)
            assert set(part.mesh.group(part.rank, "dp")) <= set(group)
            for rank in group:
                assert groups(rank, spec) == group
                assert part.slices(spec, rank) == part.slices(spec)


def test_replicas_with_other_parts_sum_nothing(monkeypatch):
    model, mesh = stacked_config(monkeypatch), Mesh(dp=2, tp=2)
    layout = model_layout(model, mesh)
    for rank in range(4):
        part = Partition(model, mesh, layout, range(2), rank)
        groups = {spec.name: part.gradient_group(spec) for spec in part.specs}
        assert groups[STACK] == (rank,)
        assert groups["model.layers.1.feed_forward.w1.weight"] == mesh.group(rank, "dp")


def test_gradients_of_spread_experts_are_summed_over_ranks_with_the_same_ones():
    """And all others over all data-parallel ranks; each counts once in the norm of a copy."""
    from oracle_routing import SPARSE
    from small_model import small_config

    model = small_config(**SPARSE | {"num_experts": 6})
    experts = "model.layers.0.feed_forward.routed_experts.ffn.w1.weight"
    for rank in range(8):
        part = part_of(model, rank, dp=2, tp=2, ep=2)
        mesh = part.mesh
        specs = {spec.name: spec for spec in part.specs}
        assert part.shape(specs[experts]) == (3, 12, 32)
        assert part.gradient_group(specs[experts]) == mesh.group(rank, "dp")
        assert part.counts(specs[experts])
        wq = specs["model.layers.0.attention.wq.weight"]
        assert part.gradient_group(wq) == mesh.group(rank, "dp", "ep")
        assert part.counts(wq) == (mesh.coordinates(rank).ep == 0)


@given(jobs())
def test_no_sum_waits_for_another(parts):
    """Every rank works through its groups in order, and a sum is done when all its ranks have come to it."""
    waiting = {part.rank: deque(group for group, _ in part.gradient_groups(part.trained)) for part in parts}
    while any(waiting.values()):
        ready = {
            queue[0]
            for queue in waiting.values()
            if queue and all(waiting[r] and waiting[r][0] == queue[0] for r in queue[0])
        }
        assert ready, waiting
        for group in ready:
            for rank in group:
                waiting[rank].popleft()


def part_of(model, rank, sequence=False, tied=True, vocab_emb_dp=True, **axes) -> Partition:
    mesh = Mesh(**axes)
    layout = model_layout(model, mesh, vocab_emb_dp=vocab_emb_dp)
    stages = split_layers(model.num_layers, mesh.pp)
    return Partition(model, mesh, layout, stages[mesh.coordinates(rank).pp], rank, sequence)


@pytest.mark.parametrize(
    ("name", "sequence", "group"),
    [
        ("attention.wq.weight", False, (1, 5)),
        ("attention.wk.weight", False, (0, 1, 4, 5)),  # two ranks share a key-value head
        ("attention_norm.weight", False, (0, 1, 2, 3, 4, 5, 6, 7)),  # inside the region: of its own heads only
        ("attention_norm.weight", True, (0, 1, 2, 3, 4, 5, 6, 7)),
        ("attention.q_norm.weight", False, (0, 1, 2, 3, 4, 5, 6, 7)),
    ],
)
def test_whose_gradients_are_parts(name, sequence, group):
    from small_model import small_config

    model = small_config(qk_norm=True)
    part = part_of(model, 1, sequence, dp=2, tp=4)
    spec = next(spec for spec in part.specs if spec.name == f"model.layers.0.{name}")
    assert part.gradient_group(spec) == group


@pytest.mark.parametrize(
    ("tied", "vocab_emb_dp", "sequence", "group"),
    [
        (True, True, False, (0, 1, 2, 3)),  # looked up in the first stage, multiplied with in the last
        (True, False, False, (1, 3)),  # each rank has its rows
        (False, True, False, (1,)),
        (False, True, True, (0, 1)),
        (False, False, True, (1,)),
    ],
)
def test_whose_gradients_of_the_embedding_are_parts(tied, vocab_emb_dp, sequence, group):
    from small_model import small_config

    model = small_config(tie_word_embeddings=tied)
    part = part_of(model, 1, sequence, vocab_emb_dp=vocab_emb_dp, tp=2, pp=2)
    assert part.gradient_group(part.specs[0]) == group
