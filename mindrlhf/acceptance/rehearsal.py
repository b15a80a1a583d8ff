"""Rehearsal of one rank of a training job, without the other ranks.

Each graph is compiled and called once. Parts, engines and graphs are those that a job builds, with weights of zeros.
Nothing depends on what graphs compute, which is garbage where a device is simulated. Left out are held-out problems,
the models of reward functions, and the longer calls of conversations with a partner.
"""

import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from mindrlhf.backend.comm.alone import AloneCollectives
from mindrlhf.backend.process.launch import World
from mindrlhf.configs.images import ImageSettings
from mindrlhf.configs.vision import SHARED_SIZES, VisionConfig
from mindrlhf.memory.pictures import Pictures
from mindrlhf.memory.work import Work
from mindrlhf.model_roles import GENERATOR, POLICY
from mindrlhf.models.vision.fixed_tower import open_known_rows
from mindrlhf.phases import CACHE
from mindrlhf.roles.part import ModelPart
from mindrlhf.roles.parts import open_parts
from mindrlhf.run.run import open_residency
from mindrlhf.shapes import longest_position
from mindrlhf.trainer.rollouts import caches, open_engines
from mindrlhf.training.batch import SequenceGroup
from mindrlhf.types import Prompt
from mindrlhf.units import DIGEST_BYTES


def rehearse(work: Work, world: World, folder: Path, stop_ids: Sequence[int]) -> None:
    """Compile the graphs of a rank's step, phase by phase.

    world: of `launch_alone`. folder: for weights that are swapped to files. stop_ids: tokens that end a response.
    """
    config = work.config
    config = config.model_copy(update={"rollout": config.rollout.model_copy(update={"verify_weights": False})})
    residency = open_residency(config.memory, work.train.context.device, folder)
    prompts = longest_prompts(work, config.data.prompts_per_step)
    longest = len(prompts[0].token_ids)
    positions = longest_position(longest, config.rollout.max_new_tokens, config.train.length_bucket)
    known = open_known_rows(work.model, config.train.tower_cache_gb)
    collectives = AloneCollectives(world)
    parts = open_parts(config, work.yamls, work.roles, collectives, positions, None, residency, known, zeros=True)
    parts.register(residency)
    if generator := parts.get(GENERATOR.name):
        engines = open_engines(config, generator, longest, stop_ids, str)
        residency.add(CACHE, caches(*engines), zeros=True)
        residency.enter("gen")
        own = generator.data_parallel.share(prompts)
        for engine, samples in zip(engines, (config.rollout.num_generations, 1), strict=True):
            if engine:
                engine.rehearse(own, samples)
    for part in parts.scoring():
        residency.enter(part.role.scoring.phase)
        part.scorer.rehearse(longest_groups(work, part, prompts))
    policy = [parts.policy] if POLICY.name in parts else []
    for part in (*parts.trained(), *policy):
        residency.enter(part.role.training.phase)
        part.updater.rehearse(longest_groups(work, part, prompts)[:: config.algorithm.updates_per_iteration])
    if parts.publishing and parts.publishing.publishes:
        residency.enter("reshard")
        parts.publishing.publish()


def longest_prompts(work: Work, count: int) -> list[Prompt]:
    """Make different prompts of the longest kind, with their pictures."""
    vision = work.model.vision
    taken = {work.model.pad_token_id} if vision is None else {vision.image_token_id, vision.video_token_id}
    word = next(number for number in range(len(taken) + 1) if number not in taken)
    prompts = []
    for number in range(count):
        pictures = blank_pictures(work.lengths.pictures, vision, number) if vision else ()
        ids = [word]
        for picture in pictures:
            ids += [vision.image_token_id] * picture.tokens + [word]
        ids += [word] * (work.lengths.prompt - len(ids))
        prompts.append(Prompt(number, np.array(ids, np.int32), pictures=pictures))
    return prompts


def blank_pictures(bound: Pictures, vision: VisionConfig, number: int) -> tuple:
    """Make black pictures for a prompt, each as large as the largest.

    number: of the prompt; pictures of different prompts are different ones.
    """
    if not bound.count:
        return ()
    from mindrlhf.images.processor import Picture  # it imports Pillow, which text does not need

    sizes = {name: getattr(vision, name) for name in SHARED_SIZES}
    settings = vision.images or ImageSettings(**sizes)
    _, rows, columns = bound.grid
    pixels = np.zeros((rows * vision.patch_size, columns * vision.patch_size, 3), np.uint8)
    names = (f"{number} {place}".encode() for place in range(bound.count))
    return tuple(Picture(pixels, hashlib.blake2b(one, digest_size=DIGEST_BYTES).digest(), settings) for one in names)


def longest_groups(work: Work, part: ModelPart, prompts: Sequence[Prompt]) -> list[SequenceGroup]:
    """Answer a part's share of the prompts with the longest responses."""
    return [longest_group(work, one) for one in part.data_parallel.share(prompts)]


def longest_group(work: Work, prompt: Prompt) -> SequenceGroup:
    """Answer a prompt with the longest responses."""
    rollout = work.config.rollout
    responses: Sequence[np.ndarray] = [np.zeros(rollout.max_new_tokens, np.int32)] * rollout.num_generations
    shown = (prompt.pictures, *[()] * len(responses)) if prompt.pictures else ()
    return SequenceGroup(prompt.token_ids, tuple(responses), identity=(prompt.id, 0), pictures=shown)
