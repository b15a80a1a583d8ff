"""Answers that are older than the weights that train on them, by a fixed number of steps."""

import random
from dataclasses import replace

import jobs
import numpy as np
import phases
import pytest
from step_parts import experience

from mindrlhf.configs.staleness import said_of_staleness
from mindrlhf.errors import UserError
from mindrlhf.flags import TrainFlags
from mindrlhf.records.batches_ahead import Batch, BatchesAhead
from mindrlhf.trainer.check import read_settings
from mindrlhf.trainer.grpo import GRPOLoop

SETTINGS = (
    *("optimizer.lr=1e-2", "train.length_bucket=48", "train.max_tokens_per_micro_batch=240", "algorithm.beta=0"),
    *jobs.ONE_LAYER,
)
CORRECTED = "rollout_correction.level=token"
AGES = ("sample/staleness_mean", "sample/staleness_max")
MEASURED = (*AGES, "sample/stale_tokens", "sample/trajectory_spans_mean", "sample/trajectory_spans_max")


def train(task, folder, *settings, **flags) -> jobs.Run:
    """A finished run in this process, of 3 steps if the settings do not say."""
    assert jobs.call(task.train(folder, *SETTINGS, *settings, **flags)) == 0
    return jobs.Run(folder)


def policy_steps(run: jobs.Run) -> list[list[int]]:
    """The steps whose weights drew the groups of each step."""
    return [sorted({e.policy_step for e in experiences}) for _, experiences in run.rollouts]


def without_ages(run: jobs.Run) -> list[dict]:
    return [{name: row[name] for name in row if name not in MEASURED} for row in run.kept_metrics]


def assert_same_weights(run: jobs.Run, other: jobs.Run) -> None:
    name = "ckpt/hf/model.safetensors"
    assert (run.folder / name).read_bytes() == (other.folder / name).read_bytes()


@pytest.fixture(scope="module")
def fresh(task, tmp_path_factory) -> jobs.Run:
    return train(task, tmp_path_factory.mktemp("fresh"), CORRECTED)


@pytest.fixture(scope="module")
def behind(task, tmp_path_factory) -> jobs.Run:
    """One step behind, of two updates a step, so that there are old log-probs."""
    return train(task, tmp_path_factory.mktemp("behind"), "trainer.staleness=1", "algorithm.updates_per_iteration=2")


def by_hand(loop: GRPOLoop):
    """Three steps of a loop that knows of no staleness, whose batches are drawn one update too soon."""
    draw = loop.source.collect
    first, second = draw(1), draw(2)
    yield loop.run.record(1, trained(loop, 1, *first), 4)
    third = draw(3)
    yield loop.run.record(2, trained(loop, 2, *second), 8)
    yield loop.run.record(3, trained(loop, 3, *third), 12)
    loop.run.checkpointer.finish()


def trained(loop: GRPOLoop, step: int, experiences, figures):
    result = loop.train(experiences, step, figures)
    loop.reshard()
    return result


def test_one_step_behind_is_what_the_parts_give_by_hand(task, behind, tmp_path, monkeypatch):
    monkeypatch.setattr(GRPOLoop, "steps", by_hand)
    made = train(task, tmp_path, CORRECTED, "algorithm.updates_per_iteration=2")
    assert behind.responses == made.responses
    assert_same_weights(behind, made)
    np.testing.assert_equal(without_ages(behind), without_ages(made))
    assert policy_steps(behind) == [[1], [1], [2]]
    assert [behind.column(name).tolist() for name in AGES] == [[0, 1, 1]] * 2


def test_age_changes_the_numbers_and_the_correction_works_on_it(behind, fresh):
    assert behind.responses[:16] == fresh.responses[:16]
    assert behind.responses[16:32] != fresh.responses[16:32]
    assert behind.column("rollout_corr/k3_kl")[0] < 1e-6 < 1e-4 < behind.column("rollout_corr/k3_kl")[1:].min()
    assert fresh.column("rollout_corr/k3_kl").max() < 1e-6


def test_more_steps_behind_than_there_are(task, fresh, tmp_path):
    """All is drawn with the first weights, and nothing for steps that do not come."""
    untrained = train(task, tmp_path / "untrained", CORRECTED, "optimizer.lr=0")
    behind = train(task, tmp_path / "behind", "trainer.staleness=7")
    assert behind.responses == untrained.responses != fresh.responses
    assert policy_steps(behind) == [[1], [1], [1]]
    assert behind.column("sample/staleness_mean").tolist() == [0, 1, 2]
    assert behind.column("training/epoch").tolist() == fresh.column("training/epoch").tolist()
    assert behind.column("perf/mfu").min() > 0


def test_a_replay_gives_the_same_weights_and_ages(task, behind, tmp_path):
    record = behind.folder / "rollouts.mindrecord"
    settings = ("trainer.staleness=1", "algorithm.updates_per_iteration=2")
    again = train(task, tmp_path, *settings, replay=record, mind_dataset_dir=None, save_data_file=None)
    assert_same_weights(again, behind)
    assert [again.column(name).tolist() for name in AGES] == [behind.column(name).tolist() for name in AGES]


@pytest.mark.slow
@pytest.mark.msrun
def test_two_ranks_have_the_same_answers(task, tmp_path):
    ranks = tuple(f"{role}_yaml.parallel_config.data_parallel=2" for role in ("train", "infer"))
    settings = ("trainer.staleness=1", "algorithm.updates_per_iteration=2", "optimizer.eps=1e-5")
    jobs.train_apart(task.train(tmp_path / "two", *SETTINGS, *settings, *ranks), 2, timeout=400)
    one = train(task, tmp_path / "one", *settings)
    two = jobs.Run(tmp_path / "two")
    assert two.responses == one.responses
    for name in ("actor/loss", "actor/grad_norm", *AGES):
        np.testing.assert_allclose(two.column(name), one.column(name), rtol=1e-4, atol=1e-7, err_msg=name)


# --- killed and resumed ---

STEPS = 6
LONG = (
    *("trainer.staleness=2", f"trainer.total_steps={STEPS}", "trainer.save_freq=1", "trainer.save_rollouts=True"),
    *("dynamic_sampling.enabled=True", "dynamic_sampling.prompts_per_round=6", "dynamic_sampling.max_rounds=3"),
    *("algorithm.updates_per_iteration=2", "trainer.progress=False", "trainer.loggers=[console, jsonl]"),
    *("rollout.max_new_tokens=8", "rollout.num_generations=2", "optimizer.eps=1e-5"),
)


def long(task: jobs.Task, folder, *settings: str, **flags) -> list[str]:
    held_out = f"data.val_dataset={task.folder}/test.mindrecord"
    measured = (held_out, "trainer.test_freq=2", "validation.limit=3", "validation.max_new_tokens=4")
    return task.train(folder, *SETTINGS, *LONG, *measured, *settings, **({"resume_training": "auto"} | flags))


@pytest.fixture(scope="module")
def whole(task, tmp_path_factory) -> jobs.Run:
    """Two steps behind, with dynamic sampling and validation, never stopped."""
    folder = tmp_path_factory.mktemp("whole")
    phases.to_the_end(long(task, folder / "run"), folder / "phases")
    return jobs.Run(folder / "run")


def assert_same(run: jobs.Run, whole: jobs.Run) -> None:
    assert run.responses == whole.responses
    assert policy_steps(run) == policy_steps(whole)
    np.testing.assert_equal(run.kept_metrics, whole.kept_metrics)
    assert_same_weights(run, whole)


@pytest.mark.slow
def test_the_long_run_is_worth_comparing(whole):
    rows = whole.kept_metrics[1:]
    assert [row["sample/staleness_max"] >= min(step, 2) for step, row in enumerate(rows)] == [True] * STEPS
    assert max(row["sampling/surplus_groups"] for row in rows) > 0  # carried over, so older still
    assert max(row["sample/staleness_max"] for row in rows) > 2
    assert len({row["actor/grad_norm"] for row in rows}) == STEPS


KILLED = (("save", 2), ("generate", 4))  # others: the cases of `test_killed_anywhere`


@pytest.mark.slow
def test_killed_in_each_phase(task, whole, tmp_path):
    rng = random.Random(str(KILLED))
    for phase, step in KILLED:
        phases.kill_in(long(task, tmp_path / "run"), tmp_path / "phases", phase, step, rng)
    phases.to_the_end(long(task, tmp_path / "run"), tmp_path / "phases")
    assert_same(jobs.Run(tmp_path / "run"), whole)


@pytest.mark.slow
@pytest.mark.parametrize("case", range(20))
def test_killed_anywhere(task, whole, tmp_path, case):
    rng = random.Random(f"staleness {case}")
    phases.kill_twice(long(task, tmp_path / "run"), tmp_path / "phases", STEPS, rng, ahead=2)
    assert_same(jobs.Run(tmp_path / "run"), whole)


@pytest.mark.slow
def test_a_smaller_staleness_trains_first_on_what_was_drawn(task, whole, tmp_path):
    """Nothing that a checkpoint holds is lost when the schedule changes."""
    three = f"{whole.folder}/ckpt/step_000003"
    settings = ("trainer.staleness=0", f"trainer.total_steps={STEPS + 2}", CORRECTED)
    output = phases.to_the_end(long(task, tmp_path / "run", *settings, resume_training=three), tmp_path / "phases")
    assert "trainer.staleness 2 -> 0" in output
    run = jobs.Run(tmp_path / "run")
    assert run.responses == [row for row in whole.responses if row[0] in (4, 5)] + run.responses[16:]
    assert policy_steps(run)[:2] == policy_steps(whole)[3:5]
    assert policy_steps(run)[-1][-1] == STEPS + 2  # the steps between take the surplus of dynamic sampling first


def test_an_early_end_says_what_is_not_trained_on(task, tmp_path, capsys):
    best = ("trainer.save_best_metric=actor/lr", "trainer.early_stop_patience=1", "trainer.total_steps=5")
    run = train(task, tmp_path, "trainer.staleness=2", CORRECTED, *best)
    assert len(run.metrics) == 2
    assert "early stop after step 2" in (said := capsys.readouterr().out)
    assert "what was drawn for steps 3 to 4 is not trained on" in said


@pytest.mark.slow
@pytest.mark.parametrize("setting", ["memory.swap=True"])
def test_with_swap(task, behind, tmp_path, setting):
    swapped = train(task, tmp_path, "trainer.staleness=1", "algorithm.updates_per_iteration=2", setting)
    assert swapped.responses == behind.responses
    assert_same_weights(swapped, behind)


# --- parts ---


def batches(*steps: int) -> BatchesAhead:
    ahead = BatchesAhead()
    for step in steps:
        given = [replace(experience(step, [0, 1]), policy_step=step - 1), experience(7, [1, np.nan])]
        ahead.put(step, Batch([replace(e, policy_step=1) for e in given], {"sampling/rounds": step}, 4 * step))
    return ahead


def test_batches_are_the_same_after_a_checkpoint():
    ahead = batches(9, 10)
    again = BatchesAhead()
    again.load_state_dict(ahead.state_dict())
    again.decode(ahead.encode(ahead.snapshot()))
    assert again.steps == (9, 10)
    assert again.state_dict() == ahead.state_dict()
    for step in (9, 10):
        ours, theirs = again.take(step), ahead.take(step)
        assert (ours.position, ours.figures) == (theirs.position, theirs.figures)
        assert [e.group.prompt.id for e in ours.experiences] == [e.group.prompt.id for e in theirs.experiences]
        for one, other in zip(ours.experiences, theirs.experiences, strict=True):
            np.testing.assert_array_equal(one.rewards, other.rewards)
            assert one.policy_step == other.policy_step
    assert not again.steps


def test_batches_without_their_experiences_are_refused():
    again = BatchesAhead()
    again.load_state_dict(batches(2, 3).state_dict())
    some = batches(2)
    with pytest.raises(ValueError, match=r"steps \[2\], and counters.ahead has \[2, 3\]"):
        again.decode(some.encode(some.snapshot()))


def settings_of(*overrides: str):
    return read_settings(TrainFlags(load_sft_checkpoint_train="model", overrides=overrides))[1]


def test_older_answers_are_corrected_for_unless_told_otherwise():
    for given, level in ((), "token"), (("rollout_correction.level=null",), None):
        config = settings_of("trainer.staleness=2", *given)
        assert config.rollout_correction.level == level
        said = said_of_staleness(config)
        assert said.startswith("trainer.staleness 2: answers are drawn with weights of 2 steps before")
        assert ("mode truncate, up to 2" in said) == (level is not None)
    assert settings_of().rollout_correction.level is None


@pytest.mark.parametrize(
    "given", ["algorithm.kl_in_reward=True", "algorithm.kl_target=0.1", "algorithm.policy_loss=kl_cov"]
)
def test_what_reads_the_weights_of_now_is_refused_or_has_them(given):
    key = given.partition("=")[0]
    with pytest.raises(UserError, match=f"trainer.staleness is 1, and {key} is .*updates_per_iteration to 2 or more"):
        settings_of("trainer.staleness=1", given)
    assert settings_of("trainer.staleness=1", given, "algorithm.updates_per_iteration=2").trainer.staleness == 1
