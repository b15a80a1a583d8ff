"""Runs of a model with experts, end to end: train, resume, export, adapters, and other commands on the result."""

import functools
import json

import jobs
import killed_ranks
import numpy as np
import pytest
from safetensors.numpy import load_file
from small_model import EXPERTS, random_arrays

from mindrlhf.checkpoint.hf import save_hf
from mindrlhf.checkpoint.peft import read_adapter
from mindrlhf.configs.model import ModelConfig
from mindrlhf.data.tokenizer import Tokenizer
from mindrlhf.models.parameters import parameter_table

ROUTER = "model.layers.1.mlp.gate.weight"
FROZEN = ("train.freeze_router=True", "train.load_balancing_coef=0.01", "trainer.save_freq=1")
SETTINGS = ("algorithm.beta=0", "optimizer.lr=1e-2", "trainer.total_steps=2", "trainer.loggers=[jsonl]")


@pytest.fixture(scope="module")
def base(task, tmp_path_factory):
    """An HF directory with random weights."""
    sizes = {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 64, "max_position_embeddings": 2048}
    heads = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "tie_word_embeddings": True}
    experts = {"num_layers": 2, "num_experts": 8}  # for 2 stages, and for 4 ranks
    config = ModelConfig(**EXPERTS | sizes | heads | experts)
    arrays = random_arrays(config)
    folder = tmp_path_factory.mktemp("experts") / "hf"
    tensors = [(spec, arrays[spec.name]) for spec in parameter_table(config)]
    save_hf(folder, config, tensors, tokenizer=Tokenizer.from_path(task.folder))
    return folder


@pytest.fixture(scope="module")
def argv(task, base):
    def words(folder, *settings, **flags):
        files = {"load_sft_checkpoint_infer": base, "sft_path_infer": None, "sft_path_train": None}
        return task.train(folder, *SETTINGS, *settings, **files | flags)

    return words


@pytest.fixture(scope="module")
def train(argv):
    def run(folder, *settings, workers=0, **flags):
        jobs.train_apart(argv(folder, *settings, **flags), workers, timeout=500)
        return jobs.Run(folder)

    return run


@pytest.fixture(scope="module")
def frozen(train, tmp_path_factory):
    """A run whose routers stay, with the balancing loss and checkpoints."""
    return train(tmp_path_factory.mktemp("frozen"), *FROZEN)


def test_all_weights_change_but_a_frozen_router(frozen, base):
    first = load_file(base / "model.safetensors")
    assert [name for name in first if np.array_equal(first[name], frozen.weights[name])] == [ROUTER]


def test_metrics_have_the_load(frozen):
    for row in frozen.metrics:
        shares = [row[f"actor/expert_load/1/{expert}"] for expert in range(8)]
        assert sum(shares) == pytest.approx(1)
        assert 0 < row["actor/expert_entropy/1"] < 1
        assert row["actor/expert_busiest/1"] == max(shares)
        assert row["actor/load_balancing"] == pytest.approx(0.01 * row["actor/expert_balance"], rel=1e-4)


def test_a_checkpoint_is_exported_whole(frozen, tmp_path):
    checkpoint = frozen.folder / "ckpt" / "step_000002"
    assert jobs.call(["export", "--checkpoint", checkpoint, "--output", tmp_path / "hf"]) == 0
    stored = (tmp_path / "hf" / "model.safetensors").read_bytes()
    assert stored == (frozen.folder / "ckpt" / "hf" / "model.safetensors").read_bytes()


def test_gguf_with_a_dense_layer_is_refused(frozen, tmp_path, capsys):
    folder = frozen.folder / "ckpt" / "hf"
    assert jobs.call(["export", "--checkpoint", folder, "--gguf", tmp_path / "model.gguf"]) == 2
    assert "1 of 2 layers have experts, and GGUF's qwen3moe has them" in capsys.readouterr().err


@pytest.mark.slow
def test_adapters_of_experts(train, base, tmp_path):
    run = train(tmp_path, "lora.rank=2", "lora.alpha=4")
    adapter = read_adapter(run.folder / "ckpt" / "hf_adapter")
    assert f"{ROUTER.removesuffix('.weight')}.lora_A.weight" not in adapter.arrays
    assert adapter.arrays["model.layers.1.mlp.experts.5.up_proj.lora_B.weight"].shape == (24, 2)
    first, name = load_file(base / "model.safetensors"), "model.layers.1.mlp.experts.{}.gate_proj.weight"
    assert any(not np.array_equal(first[name.format(i)], run.weights[name.format(i)]) for i in range(8))
    assert np.array_equal(first[ROUTER], run.weights[ROUTER])
    assert json.loads((run.folder / "ckpt" / "hf" / "config.json").read_text())["num_experts"] == 8


def assert_equal_weights(run, other):
    for name, weight in other.weights.items():
        np.testing.assert_array_equal(run.weights[name], weight, err_msg=name)


def test_replaying_the_routing_of_the_only_pass_changes_nothing(train, frozen, tmp_path):
    run = train(tmp_path, *FROZEN, "rollout.routing_replay=old")
    assert run.responses == frozen.responses
    assert_equal_weights(run, frozen)


UPDATES = {
    "passes": ("algorithm.num_iterations=3",),  # the first update gives it
    "mini-batches": ("algorithm.updates_per_iteration=2", "optimizer.lr=3e-2"),  # a pass of its own gives it
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", UPDATES)
def test_several_updates_replay_the_routing_of_the_first_pass(train, tmp_path, kind):
    settings = (*UPDATES[kind], "train.freeze_router=True", "trainer.total_steps=1")
    one, other = (train(tmp_path / replay, *settings, f"rollout.routing_replay={replay}") for replay in ("off", "old"))
    assert one.responses == other.responses
    assert any(not np.array_equal(one.weights[name], weight) for name, weight in other.weights.items())
    for run in (one, other):  # and the later updates go on from the same log-probs
        assert run.column("actor/grad_norm")[0] > 0
        assert np.isfinite(run.column("actor/ppo_kl")).all()


REPLAYED = ("rollout.routing_replay=rollout", "rollout.weights=int8", "algorithm.num_iterations=3")


@pytest.fixture(scope="module")
def recorded(train, tmp_path_factory):
    """A run with rollouts in int8 whose routing training replays, in three updates of a step."""
    return train(tmp_path_factory.mktemp("recorded"), *REPLAYED)


def test_the_routing_of_rollouts_is_recorded_and_replayed(train, recorded, tmp_path):
    record = {"replay": recorded.folder / "rollouts.mindrecord", "mind_dataset_dir": None, "save_data_file": None}
    again = train(tmp_path, *REPLAYED, **record)
    assert_equal_weights(again, recorded)
    for _, experiences in recorded.rollouts:
        for experience in experiences:
            for rollout in experience.group.rollouts:
                routing = rollout.tokens["routing"]
                assert routing.dtype == np.uint8
                assert routing.shape == (len(rollout.response_ids), 2)
                assert rollout.tokens["prompt_routing"].shape == (len(experience.group.prompt.token_ids) - 1, 2)


@pytest.mark.slow
def test_without_its_routing_a_record_trains_to_other_weights(train, recorded, tmp_path):
    record = {"replay": recorded.folder / "rollouts.mindrecord", "mind_dataset_dir": None, "save_data_file": None}
    other = train(tmp_path, *REPLAYED, "rollout.routing_replay=off", **record)
    assert any(not np.array_equal(other.weights[name], weight) for name, weight in recorded.weights.items())


def test_a_resumed_run_that_replays_routing_is_the_one_that_went_through(train, recorded, tmp_path):
    settings = (*REPLAYED, "trainer.save_freq=1")
    for steps in (1, 2):
        run = train(tmp_path, *settings, f"trainer.total_steps={steps}", resume_training="auto")
    assert_equal_weights(run, recorded)


LAYOUTS = {  # workers, layouts of training and generation
    "ep2 to ep2": (2, "dp2ep2", "dp2ep2"),
    "ep2 to tp2": (2, "dp2ep2", "tp2"),
    "tp2 to ep2": (2, "tp2", "dp2ep2tp1"),
    "ep2 tp2 to dp4": (4, "dp2ep2tp2", "dp4tp1"),
    "dp4 ep2 to tp2 ep2": (4, "dp4ep2", "dp2ep2tp2"),
    "pp2 ep2 to ep2 tp2": (4, "dp2ep2pp2", "dp2ep2tp2"),
    "ep4 to tp2 ep2": (4, "dp4ep4", "dp2ep2tp2"),
    "8 ranks": (8, "dp2ep2pp2tp2", "dp4ep4tp2"),
}
SPREAD = ("rollout.verify_weights=True", "rollout.temperature=0.7", "optimizer.eps=1e-5", "optimizer.lr=1e-3")


@pytest.fixture(scope="module")
def whole(train, tmp_path_factory):
    return train(tmp_path_factory.mktemp("whole"), *SPREAD)


def spread_settings(name: str) -> tuple[str, ...]:
    _, ours, theirs = LAYOUTS[name]
    return (*SPREAD, *jobs.layout("train", ours), *jobs.layout("infer", theirs), "trainer.save_freq=1")


@pytest.fixture(scope="module")
def spread(train, tmp_path_factory):
    """Runs in the layouts that were never stopped, by name."""
    return functools.cache(
        lambda name: train(tmp_path_factory.mktemp("spread"), *spread_settings(name), workers=LAYOUTS[name][0])
    )


@pytest.mark.slow
@pytest.mark.msrun
@pytest.mark.parametrize("name", LAYOUTS)
def test_spread_experts_train_as_one_process(spread, whole, name):
    run = spread(name)
    assert run.responses == whole.responses
    for key in ("actor/grad_norm", "actor/pg_loss", "actor/expert_entropy/1", "actor/expert_busiest/1"):
        np.testing.assert_allclose(run.column(key), whole.column(key), rtol=1e-5, atol=1e-6, err_msg=key)
    for key, weight in whole.weights.items():
        assert np.linalg.norm(run.weights[key] - weight) <= 1e-5 * np.linalg.norm(weight), key


@pytest.mark.slow
@pytest.mark.msrun
@pytest.mark.parametrize("name", ["ep2 to ep2", "dp4 ep2 to tp2 ep2"])
def test_spread_experts_draw_answers_in_parts_as_one_process(argv, train, tmp_path, name):
    """Ranks with nothing left to draw compute along with the others; some have no answer of a part at all."""
    workers, settings = LAYOUTS[name][0], spread_settings(name)
    parts = ("trainer.staleness=1", "rollout.tokens_per_step=60", "trainer.total_steps=3")
    one = train(tmp_path / "one", *SPREAD, *parts)
    run = train(tmp_path / "spread", *settings, *parts, workers=workers)
    assert run.responses == one.responses
    for key in ("sample/drawn_tokens", "sample/unfinished", "sample/trajectory_spans_max"):
        np.testing.assert_array_equal(run.column(key), one.column(key), err_msg=key)
    assert max(one.column("sample/unfinished")) > 0
    killed, hold = tmp_path / "killed", killed_ranks.Hold(1, "update", step=2, calls=1)
    words = argv(killed, *settings, *parts, resume_training="auto")
    killed_ranks.kill_all(words, tmp_path / "log", workers, hold)
    assert_same(train(killed, *settings, *parts, workers=workers, resume_training="auto"), run)


def assert_same(run, through):
    """To the last bit: answers, metrics, weights."""
    assert run.responses == through.responses
    np.testing.assert_equal(run.kept_metrics, through.kept_metrics)
    assert_equal_weights(run, through)


@pytest.mark.slow
@pytest.mark.msrun
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", LAYOUTS)
def test_spread_experts_are_killed_and_resumed(argv, train, spread, tmp_path, name):
    """All ranks at once, at some call of one of them in a phase of the second step."""
    workers, settings = LAYOUTS[name][0], spread_settings(name)
    words = argv(tmp_path / "run", *settings, resume_training="auto")
    killed_ranks.kill_all_somewhere(words, tmp_path / "log", workers, name)
    assert (tmp_path / "run" / "ckpt" / "step_000001").is_dir()
    assert_same(train(tmp_path / "run", *settings, workers=workers, resume_training="auto"), spread(name))


@pytest.mark.slow
@pytest.mark.msrun
def test_shared_moments_of_spread_experts_are_resumed(train, tmp_path):
    """Bit for bit, after a stop."""
    settings = (*spread_settings("ep2 to ep2"), "train_yaml.parallel.enable_parallel_optimizer=True")
    through = train(tmp_path / "through", *settings, workers=2)
    for steps in (1, 2):
        run = train(tmp_path / "again", *settings, f"trainer.total_steps={steps}", workers=2, resume_training="auto")
    assert run.responses[-len(through.responses) // 2 :] == through.responses[-len(through.responses) // 2 :]
    assert_equal_weights(run, through)
