"""Prints by how many MiB a process that took the gradients of a small batch grows by taking those of a large one.

python layer_memory.py keep|again, for layers whose activations are kept or computed again
"""

import sys

import numpy as np
from small_model import SmallModel

from mindrlhf.configs.grpo import OptimizerSettings, TrainSettings
from mindrlhf.metrics.performance import peak_resident_bytes
from mindrlhf.training.batch import SequenceGroup
from mindrlhf.training.graphs import PolicyLogProbs
from mindrlhf.training.objective import NEGATIVE_LOG_LIKELIHOOD
from mindrlhf.training.optimizer import AdamW
from mindrlhf.training.updater import Updater


def main(recompute: bool) -> None:
    model = SmallModel.random(
        num_layers=12, hidden_size=128, intermediate_size=1024, num_heads=4, num_kv_heads=2, head_dim=32
    )
    decoder, parameters = model.build(512, recompute=recompute)
    optimizer = AdamW(OptimizerSettings(), [parameters[spec.name] for spec in model.specs], model.specs)
    settings = TrainSettings(max_tokens_per_micro_batch=16384, length_bucket=256)
    updater = Updater(PolicyLogProbs(decoder, 1.0), NEGATIVE_LOG_LIKELIHOOD, optimizer, settings)

    def run(samples: int) -> None:
        ids = np.ones(256, np.int32)
        updater([SequenceGroup(ids, (ids,) * samples)], 1e-3, weights=[(np.ones(256, np.float32),) * samples])

    run(1)
    before = peak_resident_bytes()
    run(20)
    print((peak_resident_bytes() - before) / 2**20)


if __name__ == "__main__":
    main({"keep": False, "again": True}[sys.argv[1]])
