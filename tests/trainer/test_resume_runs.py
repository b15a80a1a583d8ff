"""A run that is killed and resumed is the run that was never stopped: same tokens, metrics and weights, bit for bit.

The job is as small as it can be and still have everything that a resume could forget: moments, a learning rate that
changes, two updates a step with old log-probs, epochs that are shuffled anew, validation, rollouts kept in files.
"""

import json
import os
import random
import shutil
import signal
import socket
from pathlib import Path

import copying_memory
import jobs
import numpy as np
import phases
import pytest

from mindrlhf.backend.compile.graph_cache import GRAPHS
from mindrlhf.files.user_cache import user_cache

STEPS = 5
SETTINGS = (
    f"trainer.total_steps={STEPS}",
    "trainer.save_freq=1",
    "trainer.save_max_ckpt_num=2",
    "trainer.save_rollouts=True",
    "trainer.loggers=[console, jsonl]",
    "trainer.progress=False",
    "trainer.test_freq=2",
    "validation.limit=3",
    "validation.max_new_tokens=4",
    "algorithm.beta=0",
    "algorithm.updates_per_iteration=2",
    "optimizer.lr=1e-2",
    "optimizer.lr_decay=cosine",
    "optimizer.warmup_steps=2",
    "optimizer.eps=1e-5",
    "data.prompts_per_step=28",  # the third step crosses into the second epoch of 64 rows
    "rollout.num_generations=2",
    "rollout.max_new_tokens=8",
    "train.length_bucket=48",
    *jobs.ONE_LAYER,
)


class Job:
    """One small job that can be run into any folder."""

    def __init__(self, task: jobs.Task):
        self.task = task
        self.settings = (*SETTINGS, f"data.val_dataset={task.folder}/test.mindrecord")

    def argv(self, folder: Path, *settings: str, **flags) -> list[str]:
        return self.task.train(folder, *self.settings, *settings, **({"resume_training": "auto"} | flags))


@pytest.fixture(scope="module")
def job(task) -> Job:
    return Job(task)


@pytest.fixture(scope="module")
def whole(job, tmp_path_factory) -> Path:
    """The run that was never stopped."""
    folder = tmp_path_factory.mktemp("whole")
    output = phases.to_the_end(job.argv(folder / "run", resume_training=None), folder / "phases")
    assert "continue" not in output
    return folder / "run"


def kept_metrics(folder: Path) -> list[dict]:
    return jobs.Run(folder).kept_metrics


def listing(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def assert_same(folder: Path, whole: Path) -> None:
    """The same files, no other ones, and in them the same numbers."""
    assert listing(folder) == listing(whole)
    np.testing.assert_equal(kept_metrics(folder), kept_metrics(whole))
    assert [row["step"] for row in kept_metrics(folder)] == list(range(STEPS + 1))
    run, expected = jobs.Run(folder), jobs.Run(whole)
    assert run.responses == expected.responses
    assert [step for step, _ in run.rollouts] == list(range(1, STEPS + 1))
    weights = [path for path in listing(whole) if path.endswith((".safetensors", ".jsonl")) and path != "metrics.jsonl"]
    ranks = len(list((whole / "ckpt" / f"step_{STEPS:06d}").glob("rank_*")))
    # The model, the shards of two checkpoints, rollouts and validation by step.
    assert len(weights) == 1 + 2 * 3 * ranks + STEPS + 4
    for name in weights:
        assert (folder / name).read_bytes() == (whole / name).read_bytes(), name


def test_the_job_is_worth_comparing(whole):
    rows = kept_metrics(whole)[1:]
    assert len({row["actor/lr"] for row in rows}) == STEPS
    assert len({row["actor/grad_norm"] for row in rows}) == STEPS
    assert all(row["actor/skipped_updates"] == 0 for row in rows)
    assert rows[1]["training/epoch"] < 1 < rows[2]["training/epoch"]
    assert listing(whole / "ckpt")[0] == "hf"
    state = json.loads((whole / "ckpt" / "step_000005" / "state.json").read_text())
    assert state["counters"]["optimizer"] == {"updates": 2 * STEPS}
    assert state["counters"]["stream"]["position"] == 28 * STEPS


def test_killed_twice(job, whole, tmp_path):
    """SIGKILL in two phases of one run, and SIGTERM in a third; the last start comes to the end."""
    rng = random.Random(0)
    argv, log = job.argv(tmp_path / "run"), tmp_path / "phases"
    for phase, step in (("save", 2), ("update", 4)):
        phases.kill_in(argv, log, phase, step, rng)
    output = phases.signalled(argv, log, "generate", 5)
    said = [line for line in output.splitlines() if line.startswith("stopped: ")]
    assert said == [
        f"stopped: the state after step 4 of 5 is saved in {tmp_path}/run/ckpt; continue with the same command and "
        "--resume_training auto."
    ]
    assert phases.to_the_end(argv, log).count("the trained model is in") == 1
    assert_same(tmp_path / "run", whole)


def test_a_finished_run_has_nothing_to_do(job, whole):
    before = {name: (whole / name).read_bytes() for name in listing(whole) if (whole / name).is_file()}
    argv = job.argv(whole, resume_training=whole / "ckpt" / "latest")
    phases.to_the_end(argv, whole.parent / "again")
    after = {name: (whole / name).read_bytes() for name in listing(whole) if (whole / name).is_file()}
    assert after.keys() == before.keys()
    changed = {name for name in before if before[name] != after[name]}
    # The settings have the flags of the last start.
    assert changed <= {"rollouts.mindrecord", "rollouts.mindrecord.db", "settings.json"}
    assert jobs.Run(whole).responses


@pytest.mark.slow
def test_going_on_where_the_host_sees_copies_of_parameters(job, whole, tmp_path):
    """As on Ascend: what is read into the moments is in them."""
    argv = job.argv(tmp_path, resume_training=whole / "ckpt" / f"step_{STEPS - 1:06d}")
    result = jobs.start([jobs.ONE_STAGE, *argv[1:]], script=copying_memory.__file__)
    assert result.returncode == 0, result.stderr
    np.testing.assert_equal(kept_metrics(tmp_path)[-1], kept_metrics(whole)[-1])
    expected = jobs.Run(whole).weights
    for name, weights in jobs.Run(tmp_path).weights.items():
        np.testing.assert_array_equal(weights, expected[name], err_msg=name)


# --- several workers, other layouts ---

# Training cuts the layers, generation shares the prompts: weights travel between the two after every step.
RESHARDED = (
    "train_yaml.parallel_config.model_parallel=2",
    "infer_yaml.parallel_config.data_parallel=2",
)
REPLICATED = ("train_yaml.parallel_config.data_parallel=2", "infer_yaml.parallel_config.data_parallel=2")

SHARED = (*jobs.layout("train", "dp2zero3"), *jobs.layout("infer", "tp2"))


@pytest.fixture(scope="module")
def resharded(job, tmp_path_factory) -> Path:
    """The run on two workers that was never stopped."""
    folder = tmp_path_factory.mktemp("resharded")
    phases.to_the_end(job.argv(folder / "run", *RESHARDED, resume_training=None), folder / "phases", workers=2)
    return folder / "run"


@pytest.mark.slow
@pytest.mark.msrun
@pytest.mark.parametrize("layout", [REPLICATED, RESHARDED, SHARED])
def test_another_layout_goes_on(job, whole, tmp_path, layout):
    """From the checkpoint of one process to two workers: the last step and the weights agree to rounding."""
    start = whole / "ckpt" / "step_000004"
    argv = job.argv(tmp_path / "run", *layout, resume_training=start)
    phases.to_the_end(argv, tmp_path / "phases", workers=2)
    run, expected = jobs.Run(tmp_path / "run"), jobs.Run(whole)
    assert [row["step"] for row in run.metrics] == [STEPS]
    assert run.responses == [response for response in expected.responses if response[0] == STEPS]
    for name in ("actor/grad_norm", "actor/entropy", "actor/lr", "critic/rewards/mean", "training/epoch"):
        np.testing.assert_allclose(run.metrics[0][name], expected.metrics[-1][name], rtol=1e-5, err_msg=name)
    for name, weight in expected.weights.items():
        difference = np.linalg.norm(run.weights[name] - weight)
        assert difference <= 1e-5 * np.linalg.norm(weight), name


@pytest.mark.slow
@pytest.mark.msrun
@pytest.mark.timeout(3600)
def test_killed_twenty_times(job, whole, resharded, tmp_path):
    """20 runs, each killed at a random moment of a phase and resumed once: all of them end like the whole one."""
    rng = random.Random(1)
    for case in range(20):
        workers = 2 if case % 4 == 3 else 0
        phase = phases.PHASES[case % 4] if workers else ("generate", "update", "save")[case % 4]
        folder = tmp_path / f"case_{case}"
        folder.mkdir()
        argv, log = job.argv(folder / "run", *(RESHARDED if workers else ())), folder / "phases"
        phases.kill_in(argv, log, phase, rng.randint(1, STEPS), rng, workers)
        phases.to_the_end(argv, log, workers)
        assert_same(folder / "run", resharded if workers else whole)


# A hundred in blocks of ten; fewer with MINDRLHF_SIGNALS=30, say.
SIGNALS = int(os.environ.get("MINDRLHF_SIGNALS", "100"))
# Workers, and how many signals a run gets before it may come to its end.
STOPPED_RUNS = ((0, 4), (0, 4), (2, 2))


def stopped_again_and_again(job, folder: Path, workers: int, count: int, rng: random.Random) -> None:
    """Start a run and signal it at a random moment, until it has got `count` signals; then let it end.

    Each start exits with 0 and says which signal it was.
    """
    folder.mkdir()
    layout = RESHARDED if workers else ()
    argv, log = job.argv(folder / "run", *layout, enable_compile_cache="True"), folder / "phases"
    # One signal comes in the start, the others in later and later steps. The last two are left alone: the run may be
    # over before the signal comes.
    starting = rng.randrange(count)
    steps = iter(sorted(rng.sample(range(1, STEPS - 1), count - 1)))
    for place in range(count):
        number = rng.choice((signal.SIGTERM, signal.SIGINT))
        phase, step, rank, calls, delay = "start", 0, 0, 0, rng.uniform(0, 1)  # less than imports take
        if place != starting:
            phase = rng.choice(("generate", "update", "save", "report", *(["reshard"] if workers else ())))
            step, rank, calls, delay = next(steps), rng.randrange(max(1, workers)), phases.calls_into(rng), 0
        where = f"{number.name}, {calls} calls, {delay:.2f} s into {phase} {step}, rank {rank} of {workers or 1}"
        log.with_suffix(".out").unlink(missing_ok=True)
        output = phases.signalled(argv, log, phase, step, number, workers, rank, calls, delay)
        assert f"{number.name} was received" in output, (where, output[-3000:])
        print(f"{where}: exit 0", flush=True)
    phases.to_the_end(argv, log, workers)


@pytest.mark.slow
@pytest.mark.msrun
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("block", range(-(-SIGNALS // 10)))
def test_a_hundred_signals(job, whole, resharded, tmp_path, monkeypatch, block):
    """Runs that are stopped at random moments and resumed exit with 0, and end like the ones never stopped."""
    shutil.copytree(user_cache(), tmp_path / "cache" / "mindrlhf", ignore=shutil.ignore_patterns(GRAPHS))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))  # compiles once, and leaves nothing behind
    rng = random.Random(f"signals {block}")
    for case, (workers, count) in enumerate(STOPPED_RUNS):
        folder = tmp_path / f"case_{case}"
        stopped_again_and_again(job, folder, workers, count, rng)
        assert_same(folder / "run", resharded if workers else whole)
        print("equal", flush=True)


# --- two runs in one folder ---


@pytest.mark.slow
@pytest.mark.parametrize("pair", range(5))
def test_two_runs_in_one_folder(job, whole, tmp_path, pair):
    """Whichever comes second is refused with the first one's name, and the first one loses nothing.

    They start at once, or the second one while the first waits somewhere in a step.
    """
    rng = random.Random(f"pair {pair}")
    argv, logs = job.argv(tmp_path / "run", resume_training=None), [tmp_path / name for name in ("one", "other")]
    phase = rng.choice(("generate", "update", "save", "report"))
    held = (phase, rng.randint(1, STEPS), phases.calls_into(rng)) if pair % 2 else ()
    runs = [phases.start(argv, logs[0], held=held)]
    if held:
        phases.wait_for(runs[0], logs[0], "held")
    runs.append(phases.start(argv, logs[1]))
    if held:
        assert runs[1].wait(600) == 2
        phases.let_go(logs[0])
    codes = [run.wait(600) for run in runs]
    assert sorted(codes) == [0, 2], [log.with_suffix(".out").read_text()[-2000:] for log in logs]
    winner, refused = runs[codes.index(0)], logs[codes.index(2)].with_suffix(".out").read_text()
    assert f"another run is writing there (process {winner.pid} on {socket.gethostname()})" in refused
    assert "Traceback" not in refused
    assert_same(tmp_path / "run", whole)
