"""Generation by ranks over which experts are spread: other prompts on each, and the tokens of one process."""

import numpy as np
import pytest
from engine_subject import BUCKET, FILTERS, LENGTHS, NEW, SEED, STEP, STOP, TEMPERATURE
from oracle_routing import SPARSE
from small_model import POSITIONS, SmallModel
from workers import run_workers

from mindrlhf.backend.process.launch import World

EXPERTS = SPARSE | {"num_experts": 8}
# Prompts of each rank: one has many, and one has none.
SHARES = {2: [(0, 1, 2, 3), (4,)], 4: [(0, 1), (2, 3, 4), (), (4,)]}
LAYOUTS = {2: {"data_parallel": 2, "expert_parallel": 2}, 4: {"data_parallel": 4, "expert_parallel": 2}}
TENSOR = {"data_parallel": 2, "expert_parallel": 2, "model_parallel": 2}


def generated(world, layout: dict, shares, settings: dict) -> dict[tuple[int, int], tuple]:
    """By prompt and sample: ids, log-probs and routing of what this rank has drawn."""
    import mindspore
    from sharded_updates import Case, model_yaml

    from mindrlhf.backend.comm.collectives import Collectives
    from mindrlhf.configs.grpo import SamplingSettings
    from mindrlhf.roles.part import ModelPart
    from mindrlhf.rollout.engine import Engine
    from mindrlhf.types import Prompt

    mindspore.set_context(mode=mindspore.GRAPH_MODE, device_target="CPU")
    model = SmallModel.random(1, **EXPERTS)
    kind = type("Part", (ModelPart,), {"records": True})
    side = kind(model_yaml(Case(layout, EXPERTS)), model.config, Collectives(world), POSITIONS)
    side.load(lambda spec: model.arrays[spec.name][side.partition.slices(spec)])
    rng = np.random.default_rng(0)
    prompts = [Prompt(i, rng.integers(0, 64, n).astype(np.int32)) for i, n in enumerate(LENGTHS)]
    own = [prompts[i] for i in shares[side.data_parallel.rank]]
    sampling = SamplingSettings(**{"max_new_tokens": NEW, "temperature": TEMPERATURE} | settings)
    slots = min(4, 3 * len(own))
    engine = Engine(model.config, side.decoder, sampling, slots, max(LENGTHS), STOP, SEED, BUCKET)
    found = {}
    for _ in range(2):  # with what is left in the cache
        for group in engine.generate(own, 3, STEP):
            for rollout in group.rollouts:
                answer = rollout.response_ids, rollout.row("policy_log_probs"), rollout.tokens["routing"]
                found[group.prompt.id, rollout.sample_index] = answer
    return found


def check(workers: int, layout: dict, shares, settings: dict) -> None:
    alone = generated(World(rank=0, size=1, device_target="CPU"), {}, [range(len(LENGTHS))], settings)
    ranks = run_workers(workers, __file__, "generated", layout=layout, shares=shares, settings=settings, timeout=550)
    assert {prompt for answers in ranks for prompt, _ in answers} == set(range(len(LENGTHS)))
    for answers in ranks:
        for key, answer in answers.items():
            np.testing.assert_array_equal(answer[0], alone[key][0])
            np.testing.assert_allclose(answer[1], alone[key][1], rtol=0, atol=2e-5)
            np.testing.assert_array_equal(answer[2], alone[key][2])


@pytest.mark.slow
@pytest.mark.msrun
@pytest.mark.parametrize(
    ("workers", "layout", "shares", "settings"),
    [
        (2, LAYOUTS[2], SHARES[2], {}),
        (2, LAYOUTS[2], [(0, 1, 2), (3, 4)], FILTERS),
        (4, LAYOUTS[4], SHARES[4], {}),
        (4, TENSOR, SHARES[2], {}),
    ],
)
def test_tokens_are_those_of_one_process(workers, layout, shares, settings):
    check(workers, layout, shares, settings)
