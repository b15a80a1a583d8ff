"""Runs whose answers are drawn in parts: each token by the weights of its step, and nothing lost."""

import random
from functools import partial

import jobs
import killed_ranks
import numpy as np
import phases
import pytest
import versioned_tokens
from split_runs import divided
from versioned_tokens import assert_drawn_by_their_weights

from mindrlhf.errors import UserError
from mindrlhf.flags import TrainFlags
from mindrlhf.trainer.check import read_settings

STEPS, NEW, SAMPLES = 4, 8, 2
QUOTA = 56
# Shapes of the long run of test_staleness.py, whose graphs serve here too.
SMALL = (
    *("optimizer.lr=1e-2", "optimizer.eps=1e-5", "train.length_bucket=48", "train.max_tokens_per_micro_batch=240"),
    *("algorithm.beta=0", f"rollout.max_new_tokens={NEW}", f"rollout.num_generations={SAMPLES}"),
    "algorithm.updates_per_iteration=2",
    *(f"{role}_yaml.model.model_config.num_layers=1" for role in ("train", "infer")),
    *("trainer.progress=False", "trainer.loggers=[jsonl]", "rollout_correction.level=token"),
)
IN_PARTS = ("trainer.staleness=2", f"rollout.tokens_per_step={QUOTA}")


def argv(task: jobs.Task, folder, *settings: str, **flags) -> list[str]:
    return task.train(folder, *SMALL, f"trainer.total_steps={STEPS}", *settings, **flags)


def train(task, folder, *settings: str, **flags) -> jobs.Run:
    assert jobs.call(argv(task, folder, *settings, **flags)) == 0
    return jobs.Run(folder)


def versions(run: jobs.Run) -> list[tuple[int, list[list[int]]]]:
    """Of each step, the step whose weights drew each token of each answer."""
    found = []
    for step, experiences in run.rollouts:
        rows = [one.row("policy_steps") for e in experiences for one in e.group.rollouts]
        found.append((step, [row.tolist() for row in rows]))
    return found


assert_same = partial(versioned_tokens.assert_same, rows=versions)


def apart(task, folder, trainers: int, generators: int, *settings: str, **flags) -> jobs.Run:
    """A finished run, every step saved, of ranks that train and ranks that generate."""
    command = argv(task, folder, *IN_PARTS, "trainer.save_freq=1", *settings, **divided(trainers, generators), **flags)
    jobs.train_apart(command, trainers + generators, timeout=400)
    return jobs.Run(folder)


def ahead(run: jobs.Run) -> list[bytes]:
    """What checkpoints hold of answers that no step has trained on."""
    return [(run.folder / f"ckpt/step_{step:06}/ahead").read_bytes() for step in range(1, STEPS + 1)]


@pytest.fixture(scope="module")
def whole(task, tmp_path_factory) -> jobs.Run:
    return train(task, tmp_path_factory.mktemp("whole"), *IN_PARTS, "trainer.save_freq=1")


def test_every_token_has_the_probability_of_the_weights_of_its_step(task, whole):
    """Of all tokens before it too: against float64, with the weights that checkpoints hold."""
    assert assert_drawn_by_their_weights(task, whole, STEPS) > 50


def test_metrics_tell_how_old_tokens_are(whole):
    rows = whole.metrics
    for (step, answers), row in zip(versions(whole), rows, strict=True):
        spans = [one[-1] - one[0] + 1 for one in answers]
        assert row["sample/stale_tokens"] == sum(version < step for one in answers for version in one)
        assert row["sample/trajectory_spans_mean"] == np.mean(spans)
        assert row["sample/trajectory_spans_max"] == max(spans)
    assert max(row["sample/trajectory_spans_max"] for row in rows) > 1
    assert rows[-1]["sample/unfinished"] == 0 < rows[0]["sample/unfinished"]
    assert sum(row["sample/drawn_tokens"] for row in rows) == sum(len(one[3]) for one in whole.responses)


@pytest.mark.msrun
def test_ranks_apart_draw_the_same_parts(task, whole, tmp_path):
    """The trainer has the shares of later batches at the end of a step; a checkpoint has them too."""
    run = apart(task, tmp_path / "run", 1, 1)
    assert_same(run, whole)
    assert ahead(run) == ahead(whole)


def test_it_needs_a_staleness():
    given = ("trainer.staleness=0", "rollout.tokens_per_step=9")
    with pytest.raises(UserError, match=r"rollout.tokens_per_step is 9; it limits what is drawn ahead of the step"):
        read_settings(TrainFlags(load_sft_checkpoint_train="model", overrides=given))


# Rewards of which two answers often have the same: some groups have no spread.
SPREAD = (
    *("dynamic_sampling.enabled=True", "dynamic_sampling.prompts_per_round=2", "dynamic_sampling.max_rounds=3"),
    "reward.overlong_factor=0",
)


def sampling(task: jobs.Task) -> tuple[str, ...]:
    (task.folder / "parity.py").write_text("def parity(prompt, completion, fields):\n    return len(completion) % 2\n")
    return (*SPREAD, f"reward.functions=[{{name: '{task.folder}/parity.py:parity'}}]")


@pytest.fixture(scope="module")
def sampled(task, tmp_path_factory) -> jobs.Run:
    return train(task, tmp_path_factory.mktemp("sampled"), *IN_PARTS, *sampling(task), "trainer.save_freq=1")


def test_dynamic_sampling_draws_what_is_missing_with_the_weights_of_the_step(sampled):
    """Groups that were drawn in parts and have no spread are replaced by whole ones of the next rows."""
    rows = sampled.metrics
    assert max(row["sampling/rounds"] for row in rows) > 1
    assert max(row["sampling/dropped_groups"] for row in rows) > 0
    fresh = 0
    seen: list[tuple[int, int]] = []
    for (step, experiences), row in zip(sampled.rollouts, rows, strict=True):
        spread = [len({*e.rewards}) > 1 for e in experiences]
        assert spread.count(False) == row["sampling/missing"]
        for e in experiences:
            first = {int(one.row("policy_steps")[0]) for one in e.group.rollouts}
            assert e.policy_step <= step
            fresh += first == {0} and e.policy_step == step  # drawn whole
            seen.append((e.group.prompt.id, e.group.prompt.occurrence))
    assert fresh > 0
    assert len(seen) == len({*seen}) == 4 * STEPS
    assert sum(row["sample/drawn_tokens"] for row in rows) >= sum(len(one[3]) for one in sampled.responses)


# --- whole runs against each other ---


@pytest.mark.slow
def test_a_quota_that_no_batch_fills_is_the_staleness_itself(task, tmp_path):
    parts = train(task, tmp_path / "parts", "trainer.staleness=2", "rollout.tokens_per_step=100000")
    behind = train(task, tmp_path / "behind", "trainer.staleness=2")
    assert parts.responses == behind.responses
    np.testing.assert_array_equal(parts.column("actor/loss"), behind.column("actor/loss"))
    assert parts.column("sample/trajectory_spans_max").tolist() == [1] * STEPS
    assert parts.weights.keys() == behind.weights.keys()
    for name, array in parts.weights.items():
        np.testing.assert_array_equal(array, behind.weights[name])


@pytest.mark.slow
def test_a_quota_that_every_step_fills_is_no_staleness(task, tmp_path):
    parts = train(task, tmp_path / "parts", "trainer.staleness=2", "rollout.tokens_per_step=1")
    fresh = train(task, tmp_path / "fresh")
    assert parts.responses == fresh.responses
    assert parts.column("sample/stale_tokens").tolist() == [0] * STEPS
    for name, array in parts.weights.items():
        np.testing.assert_array_equal(array, fresh.weights[name])


@pytest.mark.slow
@pytest.mark.parametrize("setting", ["rollout.max_slots=3", "rollout.speculation=False", "memory.swap=True"])
def test_slots_drafts_and_swap_change_no_token(task, whole, tmp_path, setting):
    run = train(task, tmp_path, *IN_PARTS, setting)
    assert versions(run) == versions(whole)
    assert run.responses == whole.responses
    np.testing.assert_allclose(run.column("actor/loss"), whole.column("actor/loss"), rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_a_replay_gives_the_same_weights(task, whole, tmp_path):
    record = whole.folder / "rollouts.mindrecord"
    again = train(task, tmp_path, *IN_PARTS, replay=record, mind_dataset_dir=None, save_data_file=None)
    for name, array in again.weights.items():
        np.testing.assert_array_equal(array, whole.weights[name])
    for name in ("sample/stale_tokens", "sample/trajectory_spans_max"):
        assert again.column(name).tolist() == whole.column(name).tolist()


@pytest.mark.slow
@pytest.mark.parametrize("case", range(10))
def test_killed_anywhere(task, whole, tmp_path, case):
    rng = random.Random(f"in parts {case}")
    command = argv(task, tmp_path / "run", *IN_PARTS, "trainer.save_freq=1", resume_training="auto")
    phases.kill_twice(command, tmp_path / "phases", STEPS, rng)
    assert_same(jobs.Run(tmp_path / "run"), whole)


@pytest.mark.slow
def test_a_run_without_parts_goes_on_with_what_is_unfinished(task, whole, tmp_path):
    two = f"{whole.folder}/ckpt/step_000002"
    settings = ("trainer.staleness=0", "rollout.tokens_per_step=null")
    output = phases.to_the_end(argv(task, tmp_path / "run", *settings, resume_training=two), tmp_path / "phases")
    assert "rollout.tokens_per_step 56 -> null" in output
    run = jobs.Run(tmp_path / "run")
    assert [step for step, _ in run.rollouts] == [3, 4]
    ours, theirs = (dict(versions(one)) for one in (run, whole))
    for mine, its in zip(ours[3], theirs[3], strict=True):
        begun = [version for version in its if version < 3]
        assert mine[: len(begun)] == begun
        assert set(mine[len(begun) :]) <= {3}


@pytest.mark.slow
@pytest.mark.parametrize("case", range(4))
def test_killed_anywhere_with_dynamic_sampling(task, sampled, tmp_path, case):
    rng = random.Random(f"sampled in parts {case}")
    words = argv(task, tmp_path / "run", *IN_PARTS, *sampling(task), "trainer.save_freq=1", resume_training="auto")
    phases.kill_twice(words, tmp_path / "phases", STEPS, rng)
    assert_same(jobs.Run(tmp_path / "run"), sampled)


@pytest.mark.slow
@pytest.mark.msrun
@pytest.mark.parametrize("generators", [1, 2])
def test_ranks_apart_sample_the_same(task, sampled, tmp_path, generators):
    run = apart(task, tmp_path, 1, generators, *sampling(task), *jobs.layout("infer", f"dp{generators}"))
    assert_same(run, sampled)
    assert ahead(run) == ahead(sampled)


@pytest.mark.slow
def test_a_quota_that_every_step_fills_samples_as_without_staleness(task, tmp_path):
    """As long as no step has trained on surplus, whose ratios a staleness corrects otherwise."""
    settings = (*sampling(task), "dynamic_sampling.prompts_per_round=4", "trainer.save_freq=1", "trainer.total_steps=2")
    parts = train(task, tmp_path / "parts", "trainer.staleness=2", "rollout.tokens_per_step=1", *settings)
    fresh = train(task, tmp_path / "fresh", *settings)
    assert parts.responses == fresh.responses
    names = ("sampling/rounds", "sampling/dropped_groups", "sampling/surplus_groups")
    for name in names:
        assert parts.column(name).tolist() == fresh.column(name).tolist()
    assert parts.column(names[0])[0] > 1


@pytest.mark.slow
@pytest.mark.msrun
def test_two_ranks_draw_the_same_parts(task, whole, tmp_path):
    ranks = tuple(f"{role}_yaml.parallel_config.data_parallel=2" for role in ("train", "infer"))
    jobs.train_apart(argv(task, tmp_path, *IN_PARTS, *ranks), 2, timeout=400)
    two = jobs.Run(tmp_path)
    assert versions(two) == versions(whole)
    assert two.responses == whole.responses
    for name in ("actor/loss", "actor/grad_norm", "sample/stale_tokens", "sample/drawn_tokens"):
        np.testing.assert_allclose(two.column(name), whole.column(name), rtol=1e-4, atol=1e-7, err_msg=name)


# --- ranks that train and ranks that generate ---


@pytest.mark.slow
@pytest.mark.msrun
@pytest.mark.parametrize("setting", ["rollout.max_slots=3", "memory.swap=True"])
def test_ranks_apart_with_other_settings(task, whole, tmp_path, setting):
    run = apart(task, tmp_path / "apart", 1, 1, setting)
    assert_same(run, train(task, tmp_path / "one", *IN_PARTS, setting))
    assert versions(run) == versions(whole)


@pytest.mark.slow
@pytest.mark.msrun
@pytest.mark.parametrize("layout", ["dp2", "dp4"])
def test_generators_of_other_numbers_draw_the_same_parts(task, whole, tmp_path, layout):
    """Whichever rank has an answer, its tokens are the same."""
    run = apart(task, tmp_path / "run", 1, int(layout[-1]), *jobs.layout("infer", layout))
    assert_same(run, whole)
    assert ahead(run) == ahead(whole)


@pytest.mark.slow
@pytest.mark.msrun
@pytest.mark.parametrize(("training", "generation"), [("dp2", "dp2"), ("tp2", "tp2")])
def test_two_trainers_and_two_generators_draw_the_parts_of_two_ranks(task, tmp_path, training, generation):
    layouts = (*jobs.layout("train", training), *jobs.layout("infer", generation))
    run = apart(task, tmp_path / "split", 2, 2, *layouts)
    jobs.train_apart(argv(task, tmp_path / "two", *IN_PARTS, *layouts), 2, timeout=400)
    assert_same(run, jobs.Run(tmp_path / "two"))


# Each goes on from where the one before was killed; (1, 0) does both on one rank.
DIVISIONS = {
    "apart first": ((1, 1), (1, 2), (1, 0), (1, 1)),
    "together first": ((1, 0), (1, 1), (1, 2), (1, 0)),
}


@pytest.mark.slow
@pytest.mark.msrun
@pytest.mark.parametrize("name", DIVISIONS)
def test_killed_and_resumed_on_other_divisions(task, whole, tmp_path, name):
    """A checkpoint holds unfinished answers, whoever drew them."""
    rng = random.Random(f"in parts {name}")
    for step, (trainers, generators) in enumerate(DIVISIONS[name], 2):
        flags = divided(trainers, generators) if generators else {}
        command = argv(task, tmp_path / "run", *IN_PARTS, "trainer.save_freq=1", resume_training="auto", **flags)
        ranks = trainers + generators
        if step <= STEPS:
            hold = killed_ranks.Hold(0, rng.choice(("update", "save", "report")), step, phases.calls_into(rng))
            print(ranks, hold, flush=True)
            killed_ranks.kill_all(command, tmp_path / f"killed_{step}", ranks, hold)
    jobs.train_apart(command, ranks if ranks > 1 else 0, timeout=400)
    run = jobs.Run(tmp_path / "run")
    assert_same(run, whole)
    assert ahead(run) == ahead(whole)


@pytest.mark.slow
@pytest.mark.msrun
@pytest.mark.parametrize("phase", ["generate", "score", "hand over", "reshard"])
@pytest.mark.parametrize("victim", [0, 1])
def test_a_side_is_killed(task, whole, tmp_path, phase, victim):
    """While the generator is in a phase of its own, or both meet."""
    command = argv(task, tmp_path / "run", *IN_PARTS, "trainer.save_freq=1", resume_training="auto", **divided(1, 1))
    hold = killed_ranks.Hold(1, phase, 3, phases.calls_into(random.Random(f"{phase} {victim}")))
    killed_ranks.kill_one(command, tmp_path / "killed", victim, hold)
    jobs.train_apart(command, 2, timeout=400)
    assert_same(jobs.Run(tmp_path / "run"), whole)


@pytest.mark.slow
@pytest.mark.msrun
def test_ranks_apart_without_parts_go_on_with_what_is_unfinished(task, whole, tmp_path):
    """As one process does that goes on without a quota."""
    two = f"{whole.folder}/ckpt/step_000002"
    settings = ("trainer.staleness=1", "rollout.tokens_per_step=null")
    run, other = tmp_path / "apart", tmp_path / "one"
    jobs.train_apart(argv(task, run, *settings, resume_training=two, **divided(1, 1)), 2, timeout=400)
    phases.to_the_end(argv(task, other, *settings, resume_training=two), tmp_path / "phases")
    assert_same(jobs.Run(run), jobs.Run(other))
