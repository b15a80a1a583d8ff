"""Divisions of a split job's ranks: which are tried, and which has the shortest step, by hand from the same rates."""

from dataclasses import replace
from math import prod

import pytest
from planned_job import work

from mindrlhf.configs.placement import Division
from mindrlhf.memory.division import Divisions, compare_divisions, divided
from mindrlhf.memory.division_table import division_lines
from mindrlhf.memory.estimate import rank_plan
from mindrlhf.memory.exchange import experience_bytes
from mindrlhf.memory.remedies import largest_peak
from mindrlhf.memory.step_time import Rates, length_of_step, side_seconds, step_seconds
from mindrlhf.memory.work import Work
from mindrlhf.units import GIB

RATES = Rates(passes=1e9, decode=1e9, memory=float("inf"))  # nothing but products, which ranks share evenly
BEHIND = "trainer.staleness=1"


def split(trainers: int, generators: int, *settings: str, **axes: int) -> Work:
    """Data-parallel ranks of each side; axes: further ones of training."""
    sides = ({"data_parallel": trainers, **axes}, {"data_parallel": generators})
    return work(*sides, settings, first_rank=trainers * prod(axes.values()))


def compared(job: Work, forecast, limit: int = GIB) -> Divisions:
    return compare_divisions(job, forecast(job), forecast, lambda _: limit)


def taking(training: float, generating: float, reshard: float = 0.0):
    """Seconds of one rank, which each side's ranks share."""

    def forecast(job: Work) -> dict[str, float]:
        took = {"gen": generating / len(job.infers), "update_actor": training / len(job.trains)}
        return {**took, "reshard": reshard} if reshard else took

    return forecast


def numbers(divisions: Divisions) -> list[tuple[int, int]]:
    return [(one.trainers, one.generators) for one in divisions.tried]


def test_the_proposal_follows_the_longer_side():
    """12 s of training and 3 s or ten times as many of generation, on one rank, over 2 + 4 or 4 + 2 ranks."""
    job = split(2, 4, BEHIND)
    short = compared(job, taking(12, 3))
    assert numbers(short) == [(2, 4), (4, 2)]
    assert [one.step_seconds for one in short.tried] == [max(6, 0.75), max(3, 1.5)]
    assert [one.idle for one in short.tried] == [{"train": 0, "infer": 0.875}, {"train": 0, "infer": 0.5}]
    assert (short.given.trainers, short.proposed.trainers) == (2, 4)
    long = compared(job, taking(12, 30))
    assert [one.step_seconds for one in long.tried] == [max(6, 7.5), max(3, 15)]
    assert [one.idle for one in long.tried] == [{"train": 1 - 6 / 7.5, "infer": 0}, {"train": 1 - 3 / 15, "infer": 0}]
    assert long.proposed is long.given


def test_a_reference_where_answers_are_drawn_counts_there():
    settings = (BEHIND, "algorithm.beta=0.1")
    seconds = {"gen": 1.0, "ref": 0.5, "update_actor": 3.0}
    beside, apart = split(2, 4, *settings, "trainer.scoring_ranks=infer"), split(2, 4, *settings)
    assert side_seconds(apart, seconds) == {"train": 3.5, "infer": 1.0}
    assert side_seconds(beside, seconds) == {"train": 3.0, "infer": 1.5}
    assert (length_of_step(apart, seconds), length_of_step(beside, seconds)) == (3.5, 3.0)
    for job, holders in ((apart, range(2)), (beside, range(2, 6))):
        assert {rank for rank in range(6) if "reference" in rank_plan(job, rank).roles} == set(holders)
    answers = 16 * 4 * 16  # prompts, samples, tokens
    assert experience_bytes(beside) - experience_bytes(apart) == answers * 4
    other = divided(beside, Division(4, 2))
    assert set(other.models["reference"]) == {4, 5}
    assert set(divided(split(2, 2, *settings, "trainer.scoring_ranks=infer"), Division(4, 4), "colocated").yamls) == {
        "train",
        "infer",
    }


def test_scoring_where_answers_are_drawn_is_named_where_it_makes_a_step_shorter():
    def forecast(job: Work) -> dict[str, float]:
        return {"gen": 4.0, "ref": 2.0, "update_actor": 5.0}

    settings = (BEHIND, "algorithm.beta=0.1")
    found = compared(split(4, 4, *settings), forecast)
    assert (found.given.step_seconds, found.beside.step_seconds) == (7, 6)
    assert (
        "scoring where answers are drawn (trainer.scoring_ranks=infer): a step of 6.0s in place of 7.0s with 4 + 4"
        in text(found).splitlines()
    )
    for job in (split(4, 4, BEHIND, "algorithm.beta=0"), split(4, 4, *settings, "trainer.scoring_ranks=infer")):
        assert compared(job, forecast).beside is None
    longer = compared(split(4, 4, *settings), lambda job: {**forecast(job), "gen": 6.0})
    assert longer.beside.step_seconds > longer.given.step_seconds
    assert "scoring_ranks" not in text(longer)


def test_ranks_that_score_are_not_divided():
    job = work({}, {}, ("algorithm.beta=0.1",), first_rank=1, score={"data_parallel": 2})
    divisions = compared(job, lambda one: {"gen": 1.0, "ref": 1.0 / len(one.models["reference"]), "update_actor": 3.0})
    assert numbers(divisions) == [(1, 1)]
    assert divisions.given.scorers == 2
    assert divisions.colocated.trainers == 4, "all ranks, of which none only scores"
    assert divisions.colocated.step_seconds == 1 + 0.25 + 3
    assert any("all 4 do both" in line for line in division_lines(divisions.figures()))


def test_ten_times_slower_decoding_moves_ranks_to_generation():
    alone = work()
    for slower, trainers in ((1, 4), (10, 2)):
        rates = replace(RATES, decode=RATES.decode / slower)
        once = step_seconds(alone, rates)
        found = compared(split(2, 4, BEHIND), lambda job, rates=rates: step_seconds(job, rates))
        for one in found.tried:
            sides = {
                "train": (once["ref"] + once["update_actor"]) / one.trainers,
                "infer": once["gen"] / one.generators,
            }
            assert one.side_seconds == pytest.approx(sides)
            assert one.step_seconds == pytest.approx(max(sides.values()))
        assert found.proposed.trainers == trainers


@pytest.mark.parametrize(
    ("staleness", "step", "idle"),
    [(0, 3 + 8 + 2, {"train": 3 / 13, "infer": 8 / 13}), (1, 8 + 2, {"train": 0, "infer": 0.5})],
)
def test_sides_take_turns_or_overlap_and_meet_for_the_weights(staleness, step, idle):
    found = compared(split(2, 2, f"trainer.staleness={staleness}"), taking(16, 6, reshard=2.0))
    assert found.given.side_seconds == {"train": 10, "infer": 5}
    assert found.given.step_seconds == step
    assert found.given.idle == pytest.approx(idle)
    assert found.colocated.step_seconds == 4 + 1.5 + 2
    assert found.colocated.idle == {}


def test_a_division_that_does_not_fit_is_not_proposed():
    """Two ranks that train have more answers each than four: 2 + 4 needs more memory, and has the shorter step."""
    job = split(4, 2, BEHIND)
    whole = compared(job, taking(12, 30))
    peaks = {one.trainers: one.peak for one in whole.tried}
    assert peaks == {2: largest_peak(split(2, 4)), 4: largest_peak(split(4, 2))}
    assert peaks[2] > peaks[4]
    assert whole.proposed.trainers == 2
    least = compared(job, taking(12, 30), peaks[2])
    assert least.proposed.trainers == 2
    less = compared(job, taking(12, 30), peaks[2] - 1)
    assert [one.fits for one in less.tried] == [False, True]
    assert less.proposed is less.given
    none = compared(job, taking(12, 30), peaks[4] - 1)
    assert none.proposed is None
    assert "division: none fits, of 2 possible with 6 ranks" in text(none)


def test_the_given_division_is_proposed_before_its_equals():
    for trainers in (2, 4):
        found = compared(split(trainers, 6 - trainers), taking(0, 0, reshard=1.0))
        assert {one.step_seconds for one in found.tried} == {1.0}
        assert found.proposed is found.given


def test_only_divisions_that_a_run_would_take_are_tried():
    """Data-parallel ranks divide 16 prompts; tensor-parallel ranks and stages stay as they are."""
    forecast = taking(1, 1)
    assert numbers(compared(split(4, 4), forecast)) == [(4, 4)]
    assert numbers(compared(split(8, 1), forecast)) == [(1, 8), (8, 1)]
    assert numbers(compared(split(1, 8, "algorithm.updates_per_iteration=4"), forecast)) == [(1, 8)]
    tensor = compared(split(1, 4, model_parallel=2), forecast)
    assert numbers(tensor) == [(2, 4), (4, 2)]
    assert tensor.tried[1].arguments == (
        *("--trainer_ranks", "4", "--generator_ranks", "2"),
        *("train_yaml.parallel_config.data_parallel=2", "infer_yaml.parallel_config.data_parallel=2"),
    )
    staged = compared(split(1, 4, pipeline_stage=4), forecast)
    assert numbers(staged) == [(4, 4)]
    assert staged.colocated.arguments == (
        "trainer.placement=colocated",
        *("train_yaml.parallel_config.data_parallel=2", "infer_yaml.parallel_config.data_parallel=8"),
    )


def text(divisions: Divisions) -> str:
    return "\n".join(division_lines(divisions.figures()))


def test_all_are_in_one_table_with_the_arguments_of_the_best():
    lines = text(compared(split(2, 4, BEHIND), taking(12, 3), 1 << 40)).splitlines()
    cells = [[cell.strip() for cell in line.split("  ") if cell] for line in lines[:4]]
    assert cells[0] == ["train + generate", "a step", "train", "wait", "generate", "wait", "peak", "fits"]
    assert [row[:6] for row in cells[1:]] == [
        ["2 + 4, given", "6.0s", "6.0s", "0%", "0.8s", "88%"],
        ["4 + 2, proposed", "3.0s", "3.0s", "0%", "1.5s", "50%"],
        ["all 6 do both", "-", "-", "-", "-", "-"],
    ]
    assert [row[-1] for row in cells[1:]] == ["yes", "yes", "refused"]
    assert lines[4:] == [
        "division: 4 + 2 has the shortest step, 3.0s in place of 6.0s, of 2 possible with 6 ranks:",
        "  --trainer_ranks 4 --generator_ranks 2 train_yaml.parallel_config.data_parallel=4 "
        "infer_yaml.parallel_config.data_parallel=2",
    ]


def test_the_best_may_be_the_given_one_or_no_division():
    given = text(compared(split(4, 4, BEHIND), taking(12, 12)))
    assert given.splitlines()[-1] == (
        "division: the given 4 + 4 has the shortest step that fits, the only one possible with 8 ranks"
    )
    turns = text(compared(split(4, 4), taking(12, 12))).splitlines()
    assert turns[-2:] == [
        "shorter still is no division, without --trainer_ranks and --generator_ranks:",
        "  trainer.placement=colocated train_yaml.parallel_config.data_parallel=8 "
        "infer_yaml.parallel_config.data_parallel=8",
    ]
