"""A model that sees in several layouts, against stored log-probs and gradients: the tower is on the first stage.

It is in the graphs, or does not train, and the graphs take its rows.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from layouts import assembled
from seeing_model import Seeing
from sharded_updates import Case, model_yaml
from workers import run_workers

from mindrlhf.models.vision.rows import part_of

# Data-parallel ranks have two sequences each, of which one has text alone.
LAYOUTS = (
    {"model_parallel": 2},
    {"model_parallel": 2, "use_seq_parallel": True},
    {"pipeline_stage": 2, "offset": [1, 0]},  # three layers
    {"data_parallel": 2},
    {
        "data_parallel": 2,
        "enable_parallel_optimizer": True,
        "optimizer_level": "level3",
    },  # with its tower
)


def on_rank(world, folder: str, layouts: list[dict], frozen: tuple[str, ...]) -> list[dict]:
    import mindspore

    mindspore.set_context(mode=mindspore.GRAPH_MODE, device_target="CPU")
    seeing = Seeing.load(Path(folder))
    seeing = replace(seeing, config=seeing.config.model_copy(update={"frozen": frozen}))
    return [results(world, seeing, Case(layout, {})) for layout in layouts]


def results(world, seeing: Seeing, case: Case) -> dict:
    """Log-probs, whole gradients by name, and how many images this rank has computed."""
    from mindrlhf.backend.comm.collectives import Collectives
    from mindrlhf.configs.grpo import OptimizerSettings, TrainSettings
    from mindrlhf.models.vision.fixed_tower import open_known_rows
    from mindrlhf.roles.part import ModelPart
    from mindrlhf.training.graphs import PolicyLogProbs
    from mindrlhf.training.objective import NEGATIVE_LOG_LIKELIHOOD

    collectives = Collectives(world)
    known = open_known_rows(seeing.config, 1.0)
    side = ModelPart(model_yaml(case), seeing.config, collectives, 128, known_rows=known)
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
    return {"log_probs": outputs, "gradients": whole, "computed": known and len(known.collect()[1])}


@pytest.mark.slow
@pytest.mark.msrun
@pytest.mark.parametrize("frozen", [(), ("vision", "merger")], ids=["trains", "frozen"])
def test_layouts_give_the_stored_results(shared, frozen):
    folder = shared / "golden" / "qwen2_5_vl_tiny"
    seeing = Seeing.load(folder)
    given = {"folder": str(folder), "layouts": list(LAYOUTS), "frozen": frozen}
    ranks = run_workers(2, __file__, "on_rank", timeout=550, **given)
    trained = {spec.name for spec in seeing.specs if part_of(spec) not in frozen}
    for rank in ranks:
        for found in rank:
            seeing.check_log_probs(found["log_probs"])
            assert found["gradients"].keys() == trained
            seeing.check_norms(found["gradients"])
    computed = [tuple(found["computed"] for found in pair) for pair in zip(*ranks, strict=True)]
    assert all(counts == (None, None) for counts in computed) == (not frozen)
    if frozen:  # each tensor-parallel rank, the first stage alone, and replicas their own
        shown = len({picture.digest for _, pictures in seeing.sequences for picture in pictures})
        assert computed[:3] == [(shown, shown), (shown, shown), (shown, 0)]
        assert sum(computed[3]) >= shown
        assert computed[4] == (0, 0)
