"""Times a vision tower that does not train: for each answer, for each prompt, and once for all steps.

OMP_NUM_THREADS=1 python benchmarks/frozen_tower.py

The model and its images are those of the job `vision` (vision_model.py): 4 prompts with an image of 256 patches each, 8
answers of 64 tokens. In the first two forms the tower is in the graphs, and in the first one it computes each image
eight times. In the third one the text's graphs take rows that are known, as they do from a step's second pass on. The
forms take turns. Printed are medians of processor seconds, and the tower's part, the difference to the third form; set
OMP_NUM_THREADS=1, or waiting threads count too.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import mindspore
import numpy as np
from vision_model import CONFIG, PATCH, PROCESSOR, SIDE

from mindrlhf.backend.cpu import CPU
from mindrlhf.configs.grpo import OptimizerSettings, SamplingSettings, TrainSettings
from mindrlhf.configs.images import ImageSettings
from mindrlhf.configs.model import ModelConfig
from mindrlhf.images.processor import ImageProcessor, Picture
from mindrlhf.models.decoder import Decoder
from mindrlhf.models.initialize import build_parameters, random_tensor
from mindrlhf.models.parameters import parameter_table
from mindrlhf.models.vision.batch import KnownSizes, PatchInputs, PictureInputs, PictureTable
from mindrlhf.models.vision.fixed_tower import FixedTower, KnownRows
from mindrlhf.rollout.engine import Engine
from mindrlhf.training.batch import SequenceGroup
from mindrlhf.training.graphs import PolicyLogProbs
from mindrlhf.training.objective import NEGATIVE_LOG_LIKELIHOOD
from mindrlhf.training.optimizer import AdamW
from mindrlhf.training.scoring import Scorer
from mindrlhf.training.updater import Updater
from mindrlhf.types import Prompt
from mindrlhf.units import GIB

PROMPTS, SAMPLES, TOKENS, TEXT = 4, 8, 64, 16
FORMS = ("each answer", "each prompt", "once")


class ForEachAnswer(PatchInputs):
    """Patches of each picture as often as a prompt has answers."""

    def table(self, pictures: Sequence[Picture], sizes: KnownSizes) -> PictureTable:
        copies = [replace(one, digest=one.digest + bytes([i])) for one in pictures for i in range(SAMPLES - 1)]
        return PictureTable([*pictures, *copies], self.vision, sizes)


def read_model() -> ModelConfig:
    """Read the job's model, with a tower that does not train."""
    names = ("min_pixels", "max_pixels", "patch_size", "temporal_patch_size", "merge_size", "image_mean", "image_std")
    tokens = {"image_token_id": 1, "video_token_id": 2, "vision_start_token_id": 3, "vision_end_token_id": 4}
    config = ModelConfig.from_hf(CONFIG | tokens, "vision_model.py", seeing=True)
    images = ImageSettings(**{name: PROCESSOR[name] for name in names})
    vision = config.vision.model_copy(update={"images": images})
    return config.model_copy(update={"vision": vision, "frozen": ("vision", "merger")})


def prepare(form: str, config: ModelConfig, groups: list[SequenceGroup]) -> dict[str, Callable[[int], object]]:
    """Build a form's passes, each a function of the round."""
    table = [spec for spec in parameter_table(config) if spec.trains]
    parameters = build_parameters(parameter_table(config), lambda spec: random_tensor(spec, config, 0))
    operators = CPU.operators()
    rows = FixedTower(config, parameters, operators, "float32", KnownRows(GIB)).inputs if form == "once" else None
    decoder = Decoder(config, parameters, operators, 4 * TOKENS, image_rows=rows)
    if form == "each answer":
        inputs: PictureInputs = ForEachAnswer(config.vision)
        decoder.pictures = inputs
    optimizer = AdamW(OptimizerSettings(), [parameters[spec.name] for spec in table], table)
    head = PolicyLogProbs(decoder, 1.0)
    updater = Updater(head, NEGATIVE_LOG_LIKELIHOOD, optimizer, TrainSettings())
    scorer = Scorer(head, TrainSettings())
    weights = [tuple(np.full(TOKENS, 1e-4, np.float32) for _ in group.responses) for group in groups]
    prompts = [Prompt(n, group.prompt_ids, pictures=group.pictures[0]) for n, group in enumerate(groups)]
    longest = len(prompts[0].token_ids)
    engine = Engine(config, decoder, SamplingSettings(max_new_tokens=TOKENS), PROMPTS * SAMPLES, longest, (), 0)
    return {
        "generation": lambda number: engine.generate(prompts, SAMPLES, number),
        "log-probs": lambda number: scorer(groups),
        "update": lambda number: updater(groups, 1e-6, weights=weights),
    }


def read_groups(config: ModelConfig) -> list[SequenceGroup]:
    """Make prompts of an image and some text, with answers."""
    rng = np.random.default_rng(0)
    processor = ImageProcessor(config.vision.images)
    groups = []
    for _ in range(PROMPTS):
        picture = processor.picture(rng.integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8), "here")
        text, *answers = rng.integers(5, config.vocab_size, (1 + SAMPLES, TOKENS)).astype(np.int32)
        ids = np.concatenate([np.full(picture.tokens, config.vision.image_token_id, np.int32), text[:TEXT]])
        groups.append(SequenceGroup(ids, tuple(answers), pictures=((picture,), *((),) * SAMPLES)))
    return groups


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    mindspore.set_context(mode=mindspore.GRAPH_MODE, device_target="CPU")
    config = read_model()
    groups = read_groups(config)
    works = {form: prepare(form, config, groups) for form in FORMS}
    seconds: dict[tuple[str, str], list[float]] = {(form, part): [] for form in FORMS for part in works[form]}
    for number in range(rounds + 1):  # graphs are built, and the third form's rows computed, in the first round
        for form, part in seconds:
            start = time.process_time()
            works[form][part](number)
            if number:
                seconds[form, part].append(time.process_time() - start)
    medians = {key: statistics.median(values) for key, values in seconds.items()}
    patches = (SIDE // PATCH) ** 2
    print(f"{PROMPTS} prompts with an image of {patches} patches each, {SAMPLES} answers; processor seconds")
    totals = {form: sum(medians[form, part] for part in works[form]) for form in FORMS}
    for part in works["once"]:
        print(f"{part}: " + ", ".join(f"{form} {medians[form, part]:.3f}" for form in FORMS))
    print("together: " + ", ".join(f"{form} {totals[form]:.3f}" for form in FORMS))
    towers = {form: totals[form] - totals["once"] for form in FORMS}
    share = towers["each prompt"] / towers["each answer"]
    print(f"tower: each answer {towers['each answer']:.3f}, each prompt {towers['each prompt']:.3f}, ratio {share:.3f}")


if __name__ == "__main__":
    main()
