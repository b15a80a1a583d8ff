"""A model that sees in several layouts, against stored log-probs and gradients: the tower is on the first stage."""

from pathlib import Path

import numpy as np
import pytest
from layouts import assembled
from seeing_model import Seeing
from sharded_updates import Case, model_yaml
from workers import run_workers

# Data-parallel ranks have two sequences each, of which one has text alone.
LAYOUTS = (
    {"model_parallel": 2},
    {"model_parallel": 2, "use_seq_parallel": True},
    {"pipeline_stage": 2, "offset": [1, 0]},  # three layers
    {"data_parallel": 2},
)


def on_rank(world, folder: str, layouts: list[dict]) -> list[dict]:
    import mindspore

    mindspore.set_context(mode=mindspore.GRAPH_MODE, device_target="CPU")
    return [results(world, Seeing.load(Path(folder)), Case(layout, {})) for layout in layouts]


def results(world, seeing: Seeing, case: Case) -> dict:
    """Log-probs and whole gradients by name."""
    from mindrlhf.backend.comm.collectives import Collectives
    from mindrlhf.configs.grpo import OptimizerSettings, TrainSettings
    from mindrlhf.roles.part import ModelPart
    from mindrlhf.training.graphs import PolicyLogProbs
    from mindrlhf.training.objective import NEGATIVE_LOG_LIKELIHOOD

    collectives = Collectives(world)
    side = ModelPart(model_yaml(case), seeing.config, collectives, 128)
    part = side.partition
    side.load(lambda spec: seeing.arrays[spec.name][part.slices(spec)])
    head = PolicyLogProbs(side.decoder, 1.0, every_token=True)
    updater = side.open_updater(head, NEGATIVE_LOG_LIKELIHOOD, OptimizerSettings(), TrainSettings(length_bucket=4))
    optimizer, step, gradients = updater.optimizer, updater.optimizer.step, {}

    def kept_step(*arguments):
        named = zip(optimizer.parameters, optimizer.gradients, strict=True)
        gradients.update({parameter.name: np.array(buffer.asnumpy()) for parameter, buffer in named})
        return step(*arguments)

    optimizer.step = kept_step
    own = side.data_parallel.share(seeing.groups)
    update = updater(own, 1e-3, weights=side.data_parallel.share(seeing.weights))
    outputs = [row for rows in side.data_parallel.gather(update.outputs) for row in rows]
    whole = assembled(part.trained_layout, collectives.all_gather_object(gradients))
    return {"log_probs": outputs, "gradients": whole}


@pytest.mark.slow
@pytest.mark.msrun
def test_layouts_give_the_stored_results(shared):
    folder = shared / "golden" / "qwen2_5_vl_tiny"
    seeing = Seeing.load(folder)
    ranks = run_workers(2, __file__, "on_rank", folder=str(folder), layouts=list(LAYOUTS), timeout=550)
    for rank in ranks:
        for found in rank:
            seeing.check_log_probs(found["log_probs"])
            seeing.check_norms(found["gradients"])
