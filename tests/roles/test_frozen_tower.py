"""Roles of a run whose policy has a vision tower that does not train: which of them take rows of images."""

import mindspore
import numpy as np
import pytest
from sharded_updates import Case, model_yaml
from small_model import POSITIONS, small_config
from small_tower import small_tower

from mindrlhf import backend
from mindrlhf.backend.comm.collectives import Collectives
from mindrlhf.backend.cpu import CPU
from mindrlhf.backend.process.launch import World
from mindrlhf.configs.loading import load_grpo_config
from mindrlhf.configs.lora import Adapter
from mindrlhf.flags import TrainFlags
from mindrlhf.images.processor import Picture
from mindrlhf.memory.residency import Residency
from mindrlhf.models.inputs import PATCH_PLACES, PATCHES, TOWER_ROWS
from mindrlhf.models.vision.fixed_tower import open_known_rows
from mindrlhf.roles.parts import open_parts
from mindrlhf.trainer.check import read_roles

VISION = small_tower(image_token_id=60)
BOTH = ("vision", "merger")


@pytest.fixture
def opened(tmp_path):
    """A function of the policy's changes and of settings: (parts, known rows, memory) of a job with random weights."""
    mindspore.set_context(mode=mindspore.GRAPH_MODE, device_target="CPU")
    yaml = model_yaml(Case({}, {}))

    def open_with(changes, *settings):
        config = load_grpo_config(None, ["algorithm.beta=0.1", *settings])
        model = small_config(family="qwen2_5_vl", vision=VISION).model_copy(update=changes)
        roles = read_roles(TrainFlags(), config, model)
        memory = Residency(lambda parameters: backend.memory.open_store(CPU, parameters, tmp_path))
        yamls = {"train": yaml, "infer": yaml}
        collectives = Collectives(World(0, 1, "CPU"))
        known = open_known_rows(model, 1.0)
        return open_parts(config, yamls, roles, collectives, POSITIONS, None, memory, known), known, memory

    return open_with


def taken(parts) -> dict[str, tuple[str, ...]]:
    """Role -> the arrays of images that its graphs take."""
    return {name: part.decoder.pictures.names for name, part in parts.items()}


ROWS, WITH_TOWER = (TOWER_ROWS,), (PATCHES, PATCH_PLACES)


@pytest.mark.parametrize("changes", [{"frozen": BOTH}, {"adapter": Adapter(2, 4.0)}], ids=["frozen", "adapters"])
def test_policy_reference_and_generator_know_each_other_s_rows(opened, changes):
    parts, known, memory = opened(changes)
    assert taken(parts) == dict.fromkeys(("reference", "policy", "generator"), ROWS)
    picture = Picture(np.full((16, 16, 3), 7, np.uint8), b"seven", VISION.images)
    rows = []
    for name, phase in {"reference": "ref", "policy": "update_actor", "generator": "gen"}.items():
        memory.enter(phase)
        rows.append(parts[name].decoder.pictures.rows_of(picture))
    assert all(one is rows[0] for one in rows)
    assert known.collect() == (2, [picture])


def test_a_reference_that_follows_and_a_critic_have_their_towers(opened):
    """The critic trains as a whole, and a reference moves as a whole."""
    settings = ("algorithm.reference_sync_steps=2", "algorithm.advantage=gae")
    parts, *_ = opened({"frozen": BOTH}, *settings)
    with_tower = dict.fromkeys(("reference", "critic"), WITH_TOWER)
    assert taken(parts) == with_tower | dict.fromkeys(("policy", "generator"), ROWS)


@pytest.mark.parametrize("frozen", [(), ("vision",), ("merger",)])
def test_with_a_tower_that_trains_all_graphs_have_it(opened, frozen):
    parts, known, _ = opened({"frozen": frozen})
    assert known is None
    assert set(taken(parts).values()) == {WITH_TOWER}
