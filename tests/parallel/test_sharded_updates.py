"""Updates on any layout give what one process gives: log-probs, losses, gradient norms, entropies, weights."""

from dataclasses import replace

import numpy as np
import pytest
import sharded_updates
from oracle_routing import SPARSE
from sharded_updates import Case, Outcome
from workers import run_workers

from mindrlhf.backend.process.launch import World
from mindrlhf.configs.lora import Adapter

TIED = {"tie_word_embeddings": True}
DP, TP, PP = "data_parallel", "model_parallel", "pipeline_stage"
SEQUENCE, CUT = {"use_seq_parallel": True}, {"vocab_emb_dp": False}
SHARED = {"enable_parallel_optimizer": True}
ZERO3 = SHARED | {"optimizer_level": "level3"}
ADAPTER = {"adapter": Adapter(4, 8, rank_pattern={"down_proj": 3})}
DROPOUT = {"adapter": replace(ADAPTER["adapter"], dropout=0.2)}
EXPERTS = SPARSE | {"num_experts": 8}
EP = "expert_parallel"
THREE = {PP: 2, "offset": (1, 0)}  # layers on two stages
# Whole runs of `tests/trainer` have stages and weights that are shared: `test_layout_pairs` and `test_equal_runs`.
FEW = {2: [Case({TP: 2} | SEQUENCE, TIED | {"qk_norm": True, "num_layers": 1})]}
MANY = {
    2: [
        Case(THREE, EXPERTS | TIED, replays=True),
        Case({TP: 2} | SEQUENCE, TIED | {"qk_norm": True}),
        Case(THREE, EXPERTS, replays=True),
        Case({PP: 2, "offset": (-1, 1)}, TIED | {"num_layers": 2}),  # no layer in the first stage
        Case({TP: 2}, {}),
        Case({TP: 2}, ADAPTER),
        Case({PP: 2}, TIED | ADAPTER),
        Case({TP: 2}, TIED),
        Case({TP: 2} | CUT, {}),
        Case({TP: 2} | CUT | SEQUENCE, TIED),
        Case({PP: 2, "micro_batch_num": 2}, {}),
        Case({DP: 2, "gradient_aggregation_group": 1}, TIED),
        Case({DP: 2, "gradient_aggregation_group": 1} | ZERO3, TIED),
        Case({DP: 2} | SHARED, {}),
        Case({DP: 2} | SHARED, ADAPTER),
        Case({TP: 2} | SEQUENCE | CUT, TIED | ADAPTER),
        Case({TP: 2}, DROPOUT),
        Case({TP: 2} | SEQUENCE, DROPOUT),
        Case({PP: 2}, DROPOUT),
        Case({DP: 2}, DROPOUT),
        Case({DP: 2}, EXPERTS),
        Case({TP: 2}, EXPERTS),
        Case({TP: 2} | SEQUENCE, EXPERTS, replays=True),
        Case({DP: 2}, EXPERTS | DROPOUT, replays=True),
        Case({DP: 2, EP: 2} | SHARED, EXPERTS | ADAPTER),
        Case({DP: 2, EP: 2}, EXPERTS),
        Case({DP: 2, EP: 2}, EXPERTS, replays=True),
        Case({DP: 2} | ZERO3, {}),
        Case({DP: 2} | ZERO3, TIED | ADAPTER),
        Case({DP: 2} | ZERO3, EXPERTS),
        Case({DP: 2, EP: 2} | ZERO3, EXPERTS),
    ],
    4: [
        Case({DP: 4, EP: 4}, EXPERTS),
        Case({DP: 4, EP: 2} | SHARED, EXPERTS),
        Case({DP: 2, EP: 2, TP: 2}, EXPERTS),
        Case({DP: 2, EP: 2, TP: 2} | SEQUENCE, EXPERTS | ADAPTER),
        Case({DP: 2, EP: 2} | THREE, EXPERTS | TIED),
        Case({DP: 2, EP: 2} | THREE, EXPERTS, replays=True),
        Case({TP: 4}, {}),  # two ranks share a key-value head
        Case({TP: 4}, ADAPTER),
        Case({TP: 2, PP: 2} | SEQUENCE, TIED | ADAPTER),
        Case({DP: 2, TP: 2} | SHARED, ADAPTER),
        Case({TP: 4} | SEQUENCE, TIED | {"qk_norm": True}),
        Case({DP: 2, TP: 2} | SHARED, TIED),
        Case({TP: 2, PP: 2} | SEQUENCE, TIED),
        Case({TP: 2, PP: 2} | CUT, TIED),
        Case({DP: 2, PP: 2, "offset": (1, 0)} | SHARED, {"num_layers": 3}),
        Case({DP: 2, TP: 2} | ZERO3, TIED),
        Case({DP: 2, TP: 2} | ZERO3 | SEQUENCE, {"qk_norm": True}),
        Case({DP: 4} | ZERO3, {"num_layers": 3}),
        Case({DP: 4, EP: 2} | ZERO3, EXPERTS),
        Case({PP: 4, "offset": (-1, 1, 1, 1)}, {"num_layers": 6}),
    ],
    8: [
        Case({DP: 2, TP: 2, PP: 2} | SEQUENCE | SHARED, TIED),
        Case({TP: 4, PP: 2}, {}),
        Case({DP: 4, EP: 2, TP: 2} | SHARED, EXPERTS),
        Case({DP: 2, EP: 2, TP: 2} | THREE | SEQUENCE, EXPERTS),
    ],
}


AGAIN = [
    Case({}, TIED | ADAPTER, again=True),
    Case({}, EXPERTS, again=True),
    Case({}, EXPERTS | DROPOUT, replays=True, again=True),
    Case({TP: 2} | SEQUENCE, {"qk_norm": True}, again=True),
    Case({DP: 2} | SHARED, DROPOUT, again=True),
    Case({DP: 2, EP: 2}, EXPERTS, again=True),
    Case({DP: 2, TP: 2}, TIED, again=True),
]


def on_rank(world, cases: list[Case]) -> list[Outcome]:
    return [sharded_updates.run(world, case) for case in cases]


def check(workers: int, cases: list[Case]) -> None:
    ranks = run_workers(workers, __file__, "on_rank", cases=cases, timeout=550)
    alone = World(rank=0, size=1, device_target="CPU")
    expected: dict[str, Outcome] = {}
    for index, case in enumerate(cases):
        key = repr((case.model, case.replays))
        if key not in expected:
            expected[key] = sharded_updates.run(alone, Case({}, case.model, case.replays))
        for rank in ranks:
            assert_equal(rank[index], expected[key], case)


def assert_equal(found: Outcome, one: Outcome, case: Case) -> None:
    for name, norm in zip(one.weights, map(np.linalg.norm, one.weights.values()), strict=True):
        assert np.linalg.norm(found.weights[name] - one.weights[name]) <= 1e-5 * norm, (case, name)
    np.testing.assert_allclose(found.losses, one.losses, rtol=1e-5, err_msg=str(case))
    # The second norm follows an update by AdamW, which enlarges the rounding of small gradients.
    np.testing.assert_allclose(found.norms, one.norms, rtol=3e-5, err_msg=str(case))
    for values, others in ((found.scores, one.scores), *zip(found.entropies, one.entropies, strict=True)):
        for group, other in zip(values, others, strict=True):
            for row, expected in zip(group, other, strict=True):
                np.testing.assert_allclose(row, expected, rtol=0, atol=1e-4, err_msg=str(case))


@pytest.mark.msrun
@pytest.mark.parametrize("workers", FEW)
def test_layouts_equal_one_process(workers):
    check(workers, FEW[workers])


@pytest.mark.slow
def test_composed_layers_that_are_computed_again_change_nothing():
    """A layer keeps only its input, and the first block and the last one share a matrix."""
    alone = World(rank=0, size=1, device_target="CPU")
    case = Case({}, TIED | {"qk_norm": True}, again=True)
    assert_equal(sharded_updates.run(alone, case), sharded_updates.run(alone, Case({}, case.model)), case)


@pytest.mark.slow
@pytest.mark.msrun
@pytest.mark.parametrize("case", AGAIN)
def test_more_layers_that_are_computed_again_change_nothing(case):
    check(case.workers, [case])


@pytest.mark.slow
@pytest.mark.msrun
@pytest.mark.parametrize("state", ["bfloat16", "int8"])
def test_replicas_that_share_rounded_moments_have_the_bits_of_those_that_do_not(state):
    """And other layouts, where gradients are summed in another order, are as near as a few other roundings allow."""
    cases = [Case({DP: 2} | shares, TIED, state=state) for shares in ({}, SHARED, ZERO3)]
    both = run_workers(2, __file__, "on_rank", cases=[*cases, Case({TP: 2}, TIED, state=state)], timeout=550)
    alone = sharded_updates.run(World(rank=0, size=1, device_target="CPU"), Case({}, TIED, state=state))
    for plain, shared, zero3, cut in both:
        for name, weight in plain.weights.items():
            assert shared.weights[name].tobytes() == weight.tobytes(), name
            for found in (plain, zero3, cut):
                assert np.linalg.norm(found.weights[name] - alone.weights[name]) <= 1e-3 * np.linalg.norm(weight), name


HALVES = {(0, 1): Case({PP: 2}, {}), (2, 3): Case({TP: 2} | SEQUENCE, {})}


def on_a_half(world) -> Outcome:
    ranks = next(ranks for ranks in HALVES if world.rank in ranks)
    return sharded_updates.run(world, HALVES[ranks], ranks)


@pytest.mark.slow
@pytest.mark.msrun
def test_two_meshes_on_two_ranks_each_train_at_the_same_time():
    """Neither waits for the other, and each equals one process."""
    alone = sharded_updates.run(World(rank=0, size=1, device_target="CPU"), Case({}, {}))
    for rank, found in enumerate(run_workers(4, __file__, "on_a_half", timeout=550)):
        assert_equal(found, alone, HALVES[(0, 1) if rank < 2 else (2, 3)])


@pytest.mark.slow
@pytest.mark.msrun
@pytest.mark.parametrize(("workers", "case"), [(workers, case) for workers, cases in MANY.items() for case in cases])
def test_more_layouts_equal_one_process(workers, case):
    check(workers, [case])
