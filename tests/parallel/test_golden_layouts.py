"""Sharded models against stored results of another implementation: log-probs, gradients, greedy tokens."""

from pathlib import Path

import numpy as np
import pytest
from layouts import assembled
from sharded_updates import Case, model_yaml
from small_model import Golden, norms_by_stored_name
from workers import run_workers

NAMES = ("llama3_tiny", "qwen3_tiny", "qwen2_tiny_lora", "qwen3_tiny_lora")
LAYOUTS = ({"model_parallel": 2}, {"model_parallel": 2, "use_seq_parallel": True}, {"pipeline_stage": 2})


def on_rank(world, folder: str, layouts: list[dict]) -> list[dict]:
    import mindspore

    mindspore.set_context(mode=mindspore.GRAPH_MODE, device_target="CPU")
    return [results(world, Golden.load(Path(folder)), Case(layout, {})) for layout in layouts]


def results(world, golden: Golden, case: Case) -> dict:
    """Log-probs, whole gradients by name, and the greedy tokens in a layout that can generate."""
    from mindrlhf.backend.comm.collectives import Collectives
    from mindrlhf.configs.grpo import OptimizerSettings, TrainSettings
    from mindrlhf.roles.part import ModelPart
    from mindrlhf.training.batch import SequenceGroup
    from mindrlhf.training.graphs import PolicyLogProbs
    from mindrlhf.training.objective import NEGATIVE_LOG_LIKELIHOOD

    collectives = Collectives(world)
    side = ModelPart(model_yaml(case), golden.config, collectives, 128)
    part = side.partition
    side.load(lambda spec: golden.arrays[spec.name][part.slices(spec)])
    tokens = None if part.mesh.pp > 1 or part.sequence else greedy(golden, side.decoder)
    head = PolicyLogProbs(side.decoder, 1.0)
    train = TrainSettings(length_bucket=4)
    updater = side.open_updater(head, NEGATIVE_LOG_LIKELIHOOD, OptimizerSettings(), train)
    optimizer, step, gradients = updater.optimizer, updater.optimizer.step, {}

    def kept_step(*arguments):
        named = zip(optimizer.parameters, optimizer.gradients, strict=True)
        gradients.update({parameter.name: np.array(buffer.asnumpy()) for parameter, buffer in named})
        return step(*arguments)

    optimizer.step = kept_step
    groups = [SequenceGroup(ids[:1], (ids[1:],)) for ids in golden.sequences]
    count = sum(len(ids) - 1 for ids in golden.sequences)
    weights = [(np.full(len(ids) - 1, 1 / count, np.float32),) for ids in golden.sequences]
    update = updater(groups, 1e-3, weights=weights)
    whole = assembled(part.trained_layout, collectives.all_gather_object(gradients))
    return {"log_probs": [row for (row,) in update.outputs], "gradients": whole, "greedy": tokens}


def greedy(golden: Golden, decoder) -> list[np.ndarray]:
    from mindrlhf.configs.grpo import SamplingSettings
    from mindrlhf.rollout.engine import Engine
    from mindrlhf.types import Prompt

    sampling = SamplingSettings(max_new_tokens=golden.greedy.shape[1], temperature=0.0)
    engine = Engine(golden.config, decoder, sampling, 3, 19, (), 0)
    prompts = [Prompt(i, ids) for i, ids in enumerate(golden.sequences)]
    return [group.rollouts[0].response_ids for group in engine.generate(prompts, 1, 1)]


@pytest.mark.slow
@pytest.mark.msrun
@pytest.mark.parametrize("name", [*NAMES, "qwen3_moe_tiny"])
def test_shards_give_the_stored_results(shared, name):
    folder = shared / "golden" / name
    golden = Golden.load(folder)
    ranks = run_workers(2, __file__, "on_rank", folder=str(folder), layouts=list(LAYOUTS), timeout=550)
    for rank in ranks:
        for found, layout in zip(rank, LAYOUTS, strict=True):
            for row, expected in zip(found["log_probs"], golden.log_probs_of, strict=True):
                np.testing.assert_allclose(row, expected, rtol=0, atol=2e-5, err_msg=str(layout))
            for stored, norm in norms_by_stored_name(golden, found["gradients"]).items():
                expected = golden.grad_norms[stored]
                np.testing.assert_allclose(norm, expected, rtol=1e-4, err_msg=f"{layout} {stored}")
            if found["greedy"] is not None:
                np.testing.assert_array_equal(found["greedy"], golden.greedy)
