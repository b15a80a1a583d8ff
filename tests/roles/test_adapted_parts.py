"""Policy and reference of a run with adapters: the policy's own weights with its adapters off, moved and kept alone."""

import numpy as np
import pytest
from sharded_updates import Case, model_yaml
from small_model import POSITIONS, small_config

from mindrlhf import backend
from mindrlhf.backend.comm.collectives import Collectives
from mindrlhf.backend.cpu import CPU
from mindrlhf.backend.process.launch import World
from mindrlhf.checkpoint.hf import save_hf
from mindrlhf.checkpoint.weights import Weights
from mindrlhf.configs.loading import load_grpo_config
from mindrlhf.configs.lora import Adapter
from mindrlhf.flags import TrainFlags
from mindrlhf.memory.residency import Residency
from mindrlhf.model_roles import SHARED, SHARED_BASE
from mindrlhf.models.parameters import parameter_table, trained_count
from mindrlhf.trainer.check import read_roles
from mindrlhf.training.batch import SequenceGroup

MODEL = small_config(num_layers=1, adapter=Adapter(4, 8))
SETTINGS = ("lora.rank=4", "algorithm.beta=0.1", "algorithm.updates_per_iteration=2")


@pytest.fixture
def opened(tmp_path):
    """A function of settings and paths: (parts, memory) of a job with random weights."""
    import mindspore

    from mindrlhf.roles.parts import open_parts

    mindspore.set_context(mode=mindspore.GRAPH_MODE, device_target="CPU")
    yaml = model_yaml(Case({}, {}))

    def open_with(*settings: str, model=MODEL, **paths: str):
        config, flags = load_grpo_config(None, [*SETTINGS, *settings]), TrainFlags(**paths)
        memory = Residency(lambda parameters: backend.memory.open_store(CPU, parameters, tmp_path))
        yamls, roles = {"train": yaml, "infer": yaml}, read_roles(flags, config, model)
        parts = open_parts(config, yamls, roles, Collectives(World(0, 1, "CPU")), POSITIONS, None, memory)
        rng = np.random.default_rng(0)
        for spec in parts.policy.partition.trained:  # as after some updates
            backend.write(parts.policy.parameters[spec.name], rng.normal(size=spec.shape).astype(np.float32) * 0.3)
        return parts, memory

    return open_with


@pytest.fixture
def groups():
    rng = np.random.default_rng(1)
    ids = lambda count: rng.integers(0, MODEL.vocab_size, count).astype(np.int32)  # noqa: E731
    return [SequenceGroup(ids(n), (ids(6), ids(9))) for n in (3, 7)]


def test_the_reference_without_a_model_is_the_base(opened, groups, tmp_path):
    """Its KL is that of a loaded copy, which reads the base from files."""
    base, random = MODEL.base, Weights(None, MODEL.base, 0).reader()
    save_hf(tmp_path / "hf", base, ((spec, random(spec)) for spec in parameter_table(base)))
    ours, _ = opened()
    loaded, memory = opened(load_ref_checkpoint=str(tmp_path / "hf"))
    memory.enter("ref")
    assert not next(ours["reference"].memory_groups())[1]
    assert len(next(loaded["reference"].memory_groups())[1]) == len(parameter_table(base))
    policy, found, expected = (part.scorer(groups) for part in (ours.policy, ours["reference"], loaded["reference"]))
    for rows in zip(policy, found, expected, strict=True):
        for now, *references in zip(*rows, strict=True):
            one, two = (np.exp(reference - now) - 1 + now - reference for reference in references)  # k3
            assert np.abs(two).max() > 1e-3
            np.testing.assert_allclose(one, two, rtol=0, atol=1e-6)


def test_a_reference_keeps_the_adapters_of_the_start(opened, groups):
    settings = ("lora.reference=start", "algorithm.reference_sync_steps=2", "algorithm.reference_sync_share=1")
    start, memory = opened(*settings)
    memory.enter("ref")
    plain, _ = opened()
    for row, other in zip(start["reference"].scorer(groups), plain["reference"].scorer(groups), strict=True):
        np.testing.assert_array_equal(np.concatenate(row), np.concatenate(other))  # B is 0 at first
    memory.enter("sync_ref")
    start["reference"].follow(start.policy)
    memory.enter("ref")
    for row, other in zip(start["reference"].scorer(groups), start.policy.scorer(groups), strict=True):
        np.testing.assert_array_equal(np.concatenate(row), np.concatenate(other))
    layout, parameters = start.arrays()["reference"]
    assert list(parameters) == list(layout.placements) == [spec.name for spec in parameter_table(MODEL) if spec.adapts]
    assert not {id(p) for p in parameters.values()} & {id(p) for p in start.policy.parameters.values()}


def test_arrays_and_memory_are_those_of_adapters(opened):
    parts, memory = opened("lora.reference=start")
    parts.register(memory)
    roles = [
        (name.partition(".")[0], p) for part in parts.values() for name, held, _ in part.memory_groups() for p in held
    ]
    sizes = {}
    for name, parameter in roles:
        sizes[name] = sizes.get(name, 0) + parameter.size
    trained, frozen = trained_count(MODEL), trained_count(MODEL.base)
    own = dict.fromkeys((SHARED, "gradients", "reference"), trained)
    assert sizes == own | {SHARED_BASE: frozen, "moments": 2 * trained}
    assert len({id(p) for _, p in roles}) == len(roles)
    for kind in ("model", "exp_avg", "exp_avg_sq"):
        layout, parameters = parts.arrays()[kind]
        assert list(parameters) == list(layout.placements)
        assert sum(parameter.size for parameter in parameters.values()) == trained


@pytest.mark.slow
def test_only_updates_drop_inputs(opened, groups):
    """One update a step would give old log-probs: with dropout a pass of the policy that generates does."""
    model = MODEL.model_copy(update={"adapter": Adapter(4, 8, dropout=0.5)})
    parts, _ = opened("algorithm.updates_per_iteration=1", model=model)
    plain, _ = opened()
    for row, other in zip(parts.policy.scorer(groups), plain.policy.scorer(groups), strict=True):
        np.testing.assert_array_equal(np.concatenate(row), np.concatenate(other))
    assert opened("algorithm.updates_per_iteration=1")[0].policy.scorer is None
    assert parts.policy.decoder_for_updates().drops
    assert not any(part.decoder.drops for part in (parts.policy, parts["reference"], parts["generator"]))
    assert plain.policy.decoder_for_updates() is plain.policy.decoder


@pytest.mark.parametrize("phase", ["gen", "ref", "old_log_prob", "update_actor", "testing", "export"])
def test_phases_that_run_the_model_have_its_base(opened, phase):
    parts, memory = opened()
    parts.register(memory)
    assert SHARED_BASE not in memory.resident()
    memory.enter(phase)
    assert SHARED_BASE in memory.resident()


@pytest.mark.parametrize("phase", ["reshard", "sync_ref", "save_checkpoint", "update_critic"])
def test_other_phases_leave_the_base_away(opened, phase):
    parts, memory = opened()
    parts.register(memory)
    memory.enter(phase)
    assert SHARED_BASE not in memory.resident()


def test_equal_layouts_share_the_base_and_the_adapters(opened):
    parts, _ = opened()
    assert not parts.policy.publishes
    assert all(parts["generator"].parameters[name] is p for name, p in parts.policy.parameters.items())


def test_a_critic_trains_all_of_its_weights(opened):
    parts, _ = opened("algorithm.advantage=gae")
    trained = sum(parameter.size for parameter in parts["critic"].updater.optimizer.gradients)
    assert trained == trained_count(MODEL.as_critic()) > trained_count(MODEL)
