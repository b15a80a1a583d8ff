"""Prints by how many MiB a process with a small picture's graphs grows by those of large pictures.

python tower_memory.py update|frozen|score|prefill [pictures] [windows along a side] [depth] [whole blocks] \
    [width] [inner width] [heads]
"""

import sys
from pathlib import Path

import numpy as np
from small_model import SmallModel

from mindrlhf.backend.cpu import CPU
from mindrlhf.configs.grpo import OptimizerSettings, TrainSettings
from mindrlhf.configs.images import ImageSettings
from mindrlhf.configs.vision import VisionConfig
from mindrlhf.images.processor import Picture
from mindrlhf.models.decoder import Decoder
from mindrlhf.models.vision.fixed_tower import FixedTower, open_known_rows
from mindrlhf.rollout.decode_graphs import Prefill
from mindrlhf.rollout.prompt_arrays import PromptArrays
from mindrlhf.training.batch import SequenceGroup
from mindrlhf.training.graphs import PolicyLogProbs
from mindrlhf.training.objective import NEGATIVE_LOG_LIKELIHOOD
from mindrlhf.training.optimizer import AdamW
from mindrlhf.training.scoring import Scorer
from mindrlhf.training.updater import Updater
from mindrlhf.types import Prompt

TOKEN, SIDE = 63, 4  # windows of 4 x 4 tokens, as the released models have them


def seeing_model(depth: int, whole: int, width: int, inner: int, heads: int, frozen: bool) -> SmallModel:
    vision = VisionConfig(
        depth=depth,
        hidden_size=width,
        intermediate_size=inner,
        num_heads=heads,
        full_attention_blocks=tuple(range(whole)),
        sections=(2, 1, 1),
        image_token_id=TOKEN,
        images=ImageSettings(),
    )
    parts = ("vision", "merger") if frozen else ()
    return SmallModel.random(family="qwen2_5_vl", vision=vision, frozen=parts)


def picture(model: SmallModel, windows: int, number: int) -> Picture:
    side = windows * SIDE * model.config.vision.token_pixels
    return Picture(np.zeros((side, side, 3), np.uint8), bytes([number, windows]), model.config.vision.images)


def resident() -> int:
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS:"))
    return int(line.split()[1]) * 1024


def main(
    kind: str,
    pictures: int = 4,
    windows: int = 4,
    depth: int = 6,
    whole: int = 2,
    width: int = 128,
    inner: int = 344,
    heads: int = 4,
) -> None:
    model = seeing_model(depth, whole, width, inner, heads, kind == "frozen")
    known = open_known_rows(model.config, 1.0)
    _, parameters = model.build(8192)
    operators = CPU.operators()
    rows = FixedTower(model.config, parameters, operators, "float32", known).inputs if known else None
    decoder = Decoder(model.config, parameters, operators, 8192, image_rows=rows)
    settings = TrainSettings(max_tokens_per_micro_batch=16384, length_bucket=32)
    head = PolicyLogProbs(decoder, 1.0)
    if kind == "prefill":
        graph, arrays = Prefill(decoder), PromptArrays(decoder)
    elif kind == "score":
        scorer = Scorer(head, settings)
    else:
        trained = [spec for spec in model.specs if spec.trains]
        optimizer = AdamW(OptimizerSettings(), [parameters[spec.name] for spec in trained], trained)
        updater = Updater(head, NEGATIVE_LOG_LIKELIHOOD, optimizer, settings)

    def run(count: int, windows: int) -> None:
        shown = tuple(picture(model, windows, number) for number in range(count))
        ids = np.concatenate([np.array([1] + [TOKEN] * one.tokens, np.int32) for one in shown] + [np.ones(2, np.int32)])
        answer = np.ones(8, np.int32)
        group = SequenceGroup(ids, (answer,), pictures=(shown, ()))
        if kind == "prefill":
            graph.on_arrays(*arrays([Prompt(0, ids, pictures=shown)], (1, len(ids) - 1)))
        elif kind == "score":
            scorer([group])
        else:
            updater([group], 1e-3, weights=[(np.ones(8, np.float32),)])

    run(1, 1)
    before = resident()
    run(pictures, windows)
    print((resident() - before) / 2**20)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
