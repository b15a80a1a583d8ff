"""Prints by how many MiB a process that took the gradients of a small batch grows by taking those of a large one.

python layer_memory.py keep|again fused|composed, for layers whose activations are kept or computed again
"""

import contextlib
import sys

import mindspore
import numpy as np
from sharded_updates import Case, composed, model_yaml
from small_model import SmallModel

from mindrlhf.backend.comm.collectives import Collectives
from mindrlhf.backend.process.launch import World
from mindrlhf.configs.grpo import OptimizerSettings, TrainSettings
from mindrlhf.metrics.performance import peak_resident_bytes
from mindrlhf.roles.part import ModelPart
from mindrlhf.training.batch import SequenceGroup
from mindrlhf.training.graphs import PolicyLogProbs
from mindrlhf.training.objective import NEGATIVE_LOG_LIKELIHOOD


def main(again: bool) -> None:
    mindspore.set_context(mode=mindspore.GRAPH_MODE, device_target="CPU")
    model = SmallModel.random(
        num_layers=12, hidden_size=128, intermediate_size=1024, num_heads=4, num_kv_heads=2, head_dim=32
    )
    alone = Collectives(World(rank=0, size=1, device_target="CPU"))
    part = ModelPart(model_yaml(Case({}, {}, again=again)), model.config, alone, 512)
    part.load(lambda spec: model.arrays[spec.name])
    settings = TrainSettings(max_tokens_per_micro_batch=16384, length_bucket=256)
    head = PolicyLogProbs(part.decoder_for_updates(), 1.0)
    updater = part.open_updater(head, NEGATIVE_LOG_LIKELIHOOD, OptimizerSettings(), settings)

    def run(samples: int) -> None:
        ids = np.ones(256, np.int32)
        updater([SequenceGroup(ids, (ids,) * samples)], 1e-3, weights=[(np.ones(256, np.float32),) * samples])

    run(1)
    before = peak_resident_bytes()
    run(20)
    print((peak_resident_bytes() - before) / 2**20)


if __name__ == "__main__":
    with composed() if sys.argv[2] == "composed" else contextlib.nullcontext():
        main({"keep": False, "again": True}[sys.argv[1]])
