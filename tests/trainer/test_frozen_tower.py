"""Runs with a vision tower that does not train: known rows of images change no bit, whatever their limit is."""

import jobs
import pytest
from seeing_task import make_seeing_task

FROZEN = "train.freeze=[vision, merger]"
RATE, SIZE = "vision/cache_hit_rate", "vision/cache_gb"
COMMON = ("train.length_bucket=16", "optimizer.lr=1e-2", "trainer.total_steps=2")
SAMPLING = ("data.prompts_per_step=3", "rollout.num_generations=2", "rollout.max_new_tokens=6")


@pytest.fixture(scope="module")
def seeing(tmp_path_factory):
    return make_seeing_task(tmp_path_factory.mktemp("seeing"), depth=1, layers=1)


def run_of(seeing, command, data, output, *settings) -> jobs.Run:
    given = {"load_sft_checkpoint_train": seeing.model, "mind_dataset_dir": data, "save_ckpt_dir": output / "ckpt"}
    flags = [str(word) for name, value in given.items() for word in (f"--{name}", value)]
    argv = [command, *flags, "--enable_compile_cache", "True", *COMMON, *settings]
    assert jobs.call(argv) == 0
    return jobs.Run(output)


def tuned(seeing, output, *settings) -> jobs.Run:
    held_out = (f"data.val_dataset={seeing.swapped}", f"data.val_problems={seeing.alike}", "trainer.test_freq=1")
    answers = (f"validation.reward={seeing.rows.parent}/reward.py:likes", "validation.max_new_tokens=4")
    return run_of(seeing, "sft", seeing.rows, output, "data.pairs_per_step=6", *held_out, *answers, *settings)


def trained(seeing, output, *settings) -> jobs.Run:
    reward = f"reward.functions=[{{name: '{seeing.rows.parent}/reward.py:likes'}}]"
    record = ("--save_data_file", str(output / "rollouts.mindrecord"))
    return run_of(seeing, "train", seeing.alike, output, *record, reward, *SAMPLING, *settings)


def numbers(run) -> list[dict]:
    """Metrics of each step but seconds, memory, and the figures of known rows."""
    left_out = ("timing", "perf/", "vision/", "swap/")
    return [{name: value for name, value in row.items() if not name.startswith(left_out)} for row in run.metrics]


def weights(run) -> bytes:
    return (run.folder / "ckpt" / "hf" / "model.safetensors").read_bytes()


@pytest.mark.slow
def test_fine_tuning_is_the_same_bit_for_bit(seeing, tmp_path):
    known, none = (
        tuned(seeing, tmp_path / name, FROZEN, *more)
        for name, more in (("known", ()), ("none", ("train.tower_cache_gb=0",)))
    )
    assert numbers(known) == numbers(none)
    assert weights(known) == weights(none)
    assert known.metrics[-1][RATE] > 0.5  # the held-out images at least
    assert known.metrics[-1][SIZE] > known.metrics[-2][SIZE] > 0
    assert [(row[RATE], row[SIZE]) for row in none.metrics if RATE in row] == [(0, 0)] * 2


@pytest.mark.slow
def test_reinforcement_learning_is_the_same_bit_for_bit(seeing, tmp_path):
    """Generation computes the rows, and the reference, old log-probs and updates find them; one image fits at most."""
    settings = (FROZEN, "algorithm.beta=0.1", "algorithm.num_iterations=2", "rollout.weights=int8")
    none = "train.tower_cache_gb=0"
    limits = {"known": (), "none": (none,), "swap": (none, "memory.swap=True"), "one": ("train.tower_cache_gb=8e-7",)}
    runs = {name: trained(seeing, tmp_path / name, *settings, *more) for name, more in limits.items()}
    known = runs.pop("known")
    for run in runs.values():
        assert numbers(run) == numbers(known)
        assert run.responses == known.responses
        assert weights(run) == weights(known)
        assert all(row[SIZE] <= 8e-7 for row in run.metrics)
    assert known.metrics[0][RATE] > 0.6
    assert runs["none"].metrics[0][RATE] == 0
    assert known.metrics[0]["actor/kl_loss"] >= 0


@pytest.mark.slow
def test_adapters_of_the_text_leave_the_tower_s_rows_known(seeing, tmp_path):
    run = trained(seeing, tmp_path, "lora.rank=2", "lora.alpha=4", "algorithm.beta=0.1")
    assert run.metrics[0][RATE] > 0.6
    assert run.column("rollout_corr/log_prob_diff/max").max() < 2e-5


@pytest.mark.slow
@pytest.mark.parametrize("freeze", ["[]", "[vision]", "[merger]"])
def test_a_tower_that_trains_knows_no_rows(seeing, tmp_path, freeze):
    run = trained(seeing, tmp_path, f"train.freeze={freeze}")
    assert not any(name.startswith("vision/") for row in run.metrics for name in row)
