"""Ranks that train and ranks that generate, killed and resumed: the run is the one that was never stopped.

One rank of the two is killed 40 times, in each phase of either side and in each step; the other one ends by itself.
"""

import functools
import random
import subprocess
from dataclasses import dataclass

import jobs
import killed_ranks
import numpy as np
import phases
import pytest
from split_runs import BEHIND, STEPS, assert_same, column, divided, long

TRAINER, GENERATOR = 0, 1
ALL_STEPS = range(1, STEPS + 1)
VALIDATED = (2, 4, STEPS)
# Steps in which a side can be held in a phase, in turn and one step behind. What is left of earlier rounds makes step 3
# without a round, and one step behind the answers to step n are drawn in step n - 1, the first ones in step 1.
COMMON = dict.fromkeys(("hand over", "reshard", "report", "save"), ALL_STEPS)
COMMON |= {"validate": VALIDATED, "export": (STEPS,)}
DRAWN = {0: {"generate": ALL_STEPS, "score": (1, 2, 4, 5)}, 1: {"generate": ALL_STEPS[:-1], "score": (1, 3, 4)}}
CHAINS = {1: 6, 0: 2}  # staleness: number of runs, each killed once in each of its steps


@dataclass(frozen=True)
class Kill:
    """A rank that is killed while a rank, perhaps the other one, waits in a phase of a step."""

    victim: int
    holder: int
    phase: str
    step: int

    def hold(self, staleness: int, rng: random.Random) -> killed_ranks.Hold:
        """Where the holder waits; a round is called by the step that trains on it."""
        number = self.step + staleness if self.phase in DRAWN[staleness] else self.step
        return killed_ranks.Hold(self.holder, self.phase, number, phases.calls_into(rng))


def drawn_kills(staleness: int) -> list[list[Kill]]:
    """The kills of each run by step: one step behind every phase of each side, with either rank as the victim."""
    rng = random.Random(f"kill {staleness}")
    places = [(chain, step) for chain in range(CHAINS[staleness]) for step in ALL_STEPS]
    rng.shuffle(places)
    held = [(TRAINER, phase, steps) for phase, steps in ({"update": ALL_STEPS} | COMMON).items()]
    held += [(GENERATOR, phase, steps) for phase, steps in (DRAWN[staleness] | COMMON).items()]
    pool = [(victim, *one) for victim in (TRAINER, GENERATOR) for one in held]
    rng.shuffle(pool)
    # Those of few steps choose first.
    pool = sorted(pool[: len(places)], key=lambda one: len(one[-1])) + pool[len(places) :]
    chains: list[dict[int, Kill]] = [{} for _ in range(CHAINS[staleness])]
    for victim, holder, phase, steps in pool:
        place = next((place for place in places if place[1] in steps), None)
        if place:
            places.remove(place)
            chain, step = place
            chains[chain][step] = Kill(victim, holder, phase, step)
    assert not places
    return [[kills[step] for step in ALL_STEPS] for kills in chains]


def test_forty_kills_are_in_every_phase_of_either_side():
    behind, in_turn = ([kill for chain in drawn_kills(staleness) for kill in chain] for staleness in (1, 0))
    assert (len(behind), len(in_turn)) == (30, 10)
    assert len({(one.victim, one.holder, one.phase) for one in behind}) == 2 * (7 + 8)
    for step in (1, STEPS):
        assert {one.victim for one in behind if one.step == step} == {TRAINER, GENERATOR}


@pytest.fixture(scope="module")
def whole(task, tmp_path_factory):
    """Runs of one process that were never stopped, by staleness."""

    @functools.cache
    def run(staleness: int) -> jobs.Run:
        folder = tmp_path_factory.mktemp("whole")
        jobs.train_apart(long(task, folder, f"trainer.staleness={staleness}"))
        run = jobs.Run(folder)
        assert max(row.get("sampling/surplus_groups", 0) for row in run.metrics) > 0
        return run

    return run


def listing(run: jobs.Run) -> list[str]:
    """All that a run left; in turn, only ranks apart note that nothing is drawn ahead."""
    return sorted(str(path.relative_to(run.folder)) for path in run.folder.rglob("*") if path.name != "ahead")


def assert_like(run: jobs.Run, whole: jobs.Run) -> None:
    """`assert_same`, and the same files, of which none is a killed run's."""
    assert_same(run, whole)
    assert listing(run) == listing(whole)


@pytest.mark.slow
@pytest.mark.msrun
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("staleness", "chain"), [(staleness, chain) for staleness, count in CHAINS.items() for chain in range(count)]
)
def test_one_rank_is_killed_in_every_step(task, whole, tmp_path, staleness, chain):
    rng = random.Random(f"calls {staleness} {chain}")
    argv = long(task, tmp_path / "run", f"trainer.staleness={staleness}", **divided(1, 1))
    for kill in drawn_kills(staleness)[chain]:
        hold = kill.hold(staleness, rng)
        print(kill, hold.calls, flush=True)
        killed_ranks.kill_one(argv, tmp_path / f"killed_{kill.step}", kill.victim, hold)
    jobs.train_apart(argv, 2, timeout=400)
    assert_like(jobs.Run(tmp_path / "run"), whole(staleness))


@pytest.mark.slow
@pytest.mark.msrun
@pytest.mark.parametrize("case", range(4))
def test_both_ranks_are_killed_anywhere(task, whole, tmp_path, case):
    """With msrun, all at once."""
    rng = random.Random(f"trainer {case}")
    argv = long(task, tmp_path / "run", BEHIND, **divided(1, 1))
    for step in sorted(rng.sample(range(1, STEPS + 1), 2)):
        phase = rng.choice(("update", "save", "report", "reshard"))
        phases.kill_in(argv, tmp_path / "phases", phase, step, rng, workers=2)
    jobs.train_apart(argv, 2, timeout=400)
    assert_same(jobs.Run(tmp_path / "run"), whole(1))


# The process of scoring kills the rank that started it at a call of a number, once.
KILLING = """
import os
import signal
from pathlib import Path

FOLDER = Path(__file__).parent

def variety(prompt, completion, fields):
    with (FOLDER / "calls").open("a+") as file:
        file.write("1")
        calls = file.tell()
    if (FOLDER / "kill_at").exists() and calls >= int((FOLDER / "kill_at").read_text()):
        (FOLDER / "kill_at").unlink()
        os.kill(os.getppid(), signal.SIGKILL)
    return len(set(completion)) / 10
"""


@pytest.mark.slow
@pytest.mark.msrun
@pytest.mark.parametrize("case", range(4))
def test_a_generator_is_killed_by_its_scoring(task, whole, tmp_path, case):
    file = tmp_path / "reward.py"
    file.write_text(KILLING)
    reward = f"reward.functions=[{{name: '{file}:variety'}}]"
    argv = long(task, tmp_path / "run", BEHIND, reward, **divided(1, 1))
    (tmp_path / "kill_at").write_text(str(random.Random(f"generator {case}").randrange(8, 80)))
    with pytest.raises((AssertionError, subprocess.TimeoutExpired)):
        jobs.train_apart(argv, 2, timeout=400)
    assert not (tmp_path / "kill_at").exists()
    jobs.train_apart(argv, 2, timeout=400)
    assert_same(jobs.Run(tmp_path / "run"), whole(1))


# --- resumed on another division ---

# Ranks that train and that generate, (n, 0) for n that do both; each goes on from where the one before was killed.
ONE_TRAINS = {
    "apart first": ((1, 1), (1, 2), (1, 0), (1, 1)),
    "together first": ((1, 0), (1, 2), (1, 1), (1, 0)),
}
TWO_TRAIN = {
    "apart first": ((1, 1), (2, 1), (2, 2), (1, 1)),
    "together first": ((2, 0), (2, 2), (2, 1), (1, 0)),
}


def on_division(task, folder, trainers: int, generators: int, layout: str) -> tuple[list[str], int]:
    """The command and its number of ranks; two ranks that generate divide each matrix."""
    flags = divided(trainers, generators) if generators else {}
    training = jobs.layout("train", layout) if trainers > 1 else []
    generation = jobs.layout("infer", "tp2") if (generators or trainers) > 1 else []
    return long(task, folder, BEHIND, *training, *generation, **flags), trainers + generators


def resumed(task, folder, divisions, layout: str = "") -> jobs.Run:
    """A run whose first division is killed in step 2, the next one in step 3, and so on, while the last one ends."""
    rng = random.Random(f"{divisions} {layout}")
    *killed, (last, ranks) = (on_division(task, folder / "run", *one, layout) for one in divisions)
    for step, (argv, count) in enumerate(killed, 2):
        hold = killed_ranks.Hold(TRAINER, rng.choice(("update", "save", "report")), step, phases.calls_into(rng))
        print(count, hold, flush=True)
        killed_ranks.kill_all(argv, folder / f"killed_{step}", count, hold)
    jobs.train_apart(last, ranks if ranks > 1 else 0, timeout=400)
    return jobs.Run(folder / "run")


@pytest.mark.slow
@pytest.mark.msrun
@pytest.mark.parametrize("name", ONE_TRAINS)
def test_resumed_on_other_divisions(task, whole, tmp_path, name):
    """Also in one process: a checkpoint holds what is drawn and not trained on, whoever drew it."""
    assert_like(resumed(task, tmp_path, ONE_TRAINS[name]), whole(1))


@pytest.mark.slow
@pytest.mark.msrun
@pytest.mark.parametrize("layout", ["dp2", "tp2"])
@pytest.mark.parametrize("name", TWO_TRAIN)
def test_resumed_with_other_ranks_that_train(task, whole, tmp_path, name, layout):
    """The same answers; metrics and weights agree to rounding."""
    run, expected = resumed(task, tmp_path, TWO_TRAIN[name], layout), whole(1)
    assert run.responses == expected.responses
    for key in ("actor/grad_norm", "actor/entropy", "actor/lr", "critic/rewards/mean", "training/epoch"):
        np.testing.assert_allclose(column(run, key), column(expected, key), rtol=1e-5, err_msg=key)
    for key, weight in expected.weights.items():
        assert np.linalg.norm(run.weights[key] - weight) <= 1e-5 * np.linalg.norm(weight), key
