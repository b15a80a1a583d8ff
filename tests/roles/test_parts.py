"""Policy, reference and critic of one process: memory roles, arrays to save, publishing and export."""

import numpy as np
import pytest
from safetensors.numpy import load_file
from scoring_models import small_tokenizer
from sharded_updates import Case, model_yaml
from small_model import POSITIONS, small_config

from mindrlhf import backend
from mindrlhf.backend import native
from mindrlhf.backend.comm.collectives import Collectives
from mindrlhf.backend.cpu import CPU
from mindrlhf.backend.native import packing
from mindrlhf.backend.process.launch import World
from mindrlhf.configs.loading import load_grpo_config
from mindrlhf.configs.lora import Adapter
from mindrlhf.flags import TrainFlags
from mindrlhf.memory.residency import Residency
from mindrlhf.model_roles import INFER, INFER_BASE, TRAIN
from mindrlhf.models.parameters import decoded_rows
from mindrlhf.trainer.check import read_roles

SETTINGS = ("algorithm.advantage=gae", "algorithm.beta=0.1", "algorithm.updates_per_iteration=2")


@pytest.fixture
def opened(tmp_path):
    """A function of settings: (parts, memory) of a job with random weights."""
    import mindspore

    from mindrlhf.roles.parts import open_parts

    mindspore.set_context(mode=mindspore.GRAPH_MODE, device_target="CPU")
    yaml = model_yaml(Case({}, {}))

    def open_with(*settings: str, generates: bool = True, model=None):
        config = load_grpo_config(None, [*SETTINGS, *settings])
        roles = read_roles(TrainFlags(), config, model or small_config())
        memory = Residency(lambda parameters: backend.memory.open_store(CPU, parameters, tmp_path))
        roles = {name: one for name, one in roles.items() if name != "generator" or generates}
        yamls = {"train": yaml, "infer": yaml}
        return open_parts(config, yamls, roles, Collectives(World(0, 1, "CPU")), POSITIONS, None, memory), memory

    return open_with


def test_every_parameter_is_in_memory_once(opened):
    parts, memory = opened()
    parts.register(memory)
    assert not memory.resident(), "everything leaves memory until a phase needs it"
    roles = [(name, p) for part in parts.values() for name, parameters, _ in part.memory_groups() for p in parameters]
    assert len({id(p) for _, p in roles}) == len(roles)
    held = {id(p) for _, p in roles}
    for part in parts.values():
        assert {id(p) for _, named in part.arrays().values() for p in named.values()} <= held
        assert {id(p) for p in part.parameters.values()} <= held
    assert {name.partition(".")[0] for name, _ in roles} == {
        *("shared_weights", "gradients", "moments", "reference"),
        *("critic", "critic_gradients", "critic_moments"),
    }


def test_arrays_that_a_checkpoint_holds(opened):
    parts, _ = opened()
    kinds = ["model", "exp_avg", "exp_avg_sq", "critic", "critic_exp_avg", "critic_exp_avg_sq"]
    assert list(parts.arrays()) == kinds
    assert set(parts.counters()) == {"optimizer", "updates", "critic"}
    for layout, parameters in parts.arrays().values():
        assert list(parameters) == list(layout.placements)
    following, _ = opened("algorithm.reference_sync_steps=2", "algorithm.advantage=grpo")
    assert list(following.arrays()) == ["reference", *kinds[:3]]


def test_equal_layouts_share_the_published_weights(opened):
    parts, _ = opened("algorithm.updates_per_iteration=1")
    assert not parts.policy.publishes
    assert all(parts["generator"].parameters[name] is p for name, p in parts.policy.parameters.items())
    assert parts.policy.scorer is None, "the first update sees all of a step"
    replay, memory = opened(generates=False)
    assert "generator" not in replay
    replay.register(memory)
    memory.enter("update_actor")
    assert TRAIN in memory.resident()


def test_a_part_exports_its_weights(opened, tmp_path):
    parts, _ = opened()
    parts["critic"].save_hf(tmp_path / "critic", small_tokenizer())
    stored = load_file(tmp_path / "critic" / "model.safetensors")
    for spec in parts["critic"].partition.specs:
        np.testing.assert_array_equal(stored[spec.hf_name], backend.read(parts["critic"].parameters[spec.name]))


@pytest.mark.parametrize("weights", ["bfloat16", "int8"])
def test_packed_weights_follow_what_is_published(opened, weights):
    if native.library().problem:
        pytest.skip("packed weights take the fused operators")
    parts, _ = opened(f"rollout.weights={weights}")
    policy, generator = parts.policy, parts["generator"]
    assert policy.publishes
    assert generator.rollout_decoder is not generator.decoder

    def packed():
        return {p.name: backend.read(p).copy() for p in generator.packed_parameters(trained=True)}

    first = packed()
    held = [p for role, parameters, _ in policy.memory_groups() if role == INFER for p in parameters]
    assert {p.name for p in held} == set(first)
    for parameter in policy.parameters.values():
        backend.write(parameter, 2 * backend.read(parameter))
    moved = policy.publish()
    assert moved.bytes_received == moved.bytes_copied == 0
    found, words = packed(), []
    for spec in decoded_rows(small_config()):
        doubled = backend.read(policy.parameters[spec.name])
        expected = np.empty_like(first[f"packed.{spec.name}"])
        packing.pack(weights, doubled, expected)
        np.testing.assert_array_equal(found[f"packed.{spec.name}"], expected)
        assert (found[f"packed.{spec.name}"] != first[f"packed.{spec.name}"]).any()
        words.append(spec.shape[0] * (-(-spec.shape[1] // 64) * 17 if weights == "int8" else spec.shape[1] // 2))
    assert sum(p.nbytes for p in held) == 4 * sum(words)


def test_a_packed_base_is_not_packed_again(opened):
    if native.library().problem:
        pytest.skip("packed weights take the fused operators")
    parts, _ = opened("rollout.weights=int8", model=small_config(adapter=Adapter(4, 8)))
    assert not parts.policy.publishes
    roles = {role: parameters for role, parameters, _ in parts.policy.memory_groups()}
    assert {id(p) for p in roles[INFER_BASE]} == {id(p) for p in parts["generator"].packed_parameters(trained=False)}
