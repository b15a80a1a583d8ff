"""The kit passes on the CPU, covers every operator of the list, and names each fault that is put in."""

import json
from pathlib import Path

import mindspore
import numpy as np
import pytest
from operator_list import LIST
from slow_cases import few_of
from workers import run_workers

from mindrlhf import cli
from mindrlhf.acceptance.catalogue import all_checks
from mindrlhf.acceptance.checks import Trial
from mindrlhf.acceptance.faults import FAULTS, injected
from mindrlhf.acceptance.worker import findings_of
from mindrlhf.backend.cpu import CPU
from mindrlhf.errors import UserError

ENDING = ("lost_process", "hang")  # of the process: found by the kit's own
WHOLE = ("kl_sign", "learning_rate")  # of commands


@pytest.fixture(scope="module", autouse=True)
def _on_cpu():
    mindspore.set_context(mode=mindspore.GRAPH_MODE, device_target=CPU.name)


def checks_of(word: str, ranks: int = 1, dtype: str = "float32") -> list:
    """The first check with the word in its name, or the first of each kind of several."""
    checks = [one for one in all_checks(CPU, "model", 2) if word in one.name and one.ranks == ranks]
    return [one for one in checks if one.name.endswith(dtype) or not one.name.endswith("16")]


def failed(check, trial: Trial) -> list[str]:
    return [one.part for one in findings_of(check, trial) if not one.passed]


def test_every_operator_of_the_list_is_covered():
    covered = {name for one in all_checks(CPU, "run", 2) for name in one.covers}
    assert covered == LIST


RANKED = [name for name, one in FAULTS.items() if one.check.startswith(("collectives", "reshard"))]
SINGLE = [name for name in FAULTS if name not in (*RANKED, *ENDING, *WHOLE)]


def test_there_are_enough_faults():
    assert len(FAULTS) >= 20


# Those whose checks take seconds of a processor.
SLOW = ("clipping", "group_attention", "expert_shares", "decode_attention", "random_numbers", "one_norm", "temperature")
SLOW += ("rotary_base", "rotary")


@pytest.mark.parametrize("name", few_of([one for one in SINGLE if one not in SLOW], SLOW))
def test_a_fault_is_named(tmp_path, name):
    fault = FAULTS[name]
    check = checks_of(fault.check)[0]
    assert failed(check, Trial(CPU, tmp_path)) == []
    with injected(name, CPU):
        parts = failed(check, Trial(CPU, tmp_path))
    assert any(fault.part in part for part in parts), parts


@pytest.mark.slow
def test_the_first_layer_that_differs_is_said(tmp_path):
    (check,) = checks_of("qwen2 rows")
    with injected("one_norm", CPU):
        found = [one for one in findings_of(check, Trial(CPU, tmp_path)) if not one.passed]
    assert found[0].part == "rows after layer 1 feed-forward"
    assert found[0].note == "the first that differs"
    assert [one.note for one in found[1:]] == [""] * len(found[1:])


def test_an_unknown_fault_is_refused():
    with (
        pytest.raises(UserError, match="--inject nothing: there is no such fault; there are "),
        injected("nothing", CPU),
    ):
        pass


def with_faults(world, faults, folder):
    """What each of the ranks' checks finds, without a fault and with each of them: name -> [failed parts]."""
    trial = Trial(CPU, Path(folder), world)
    checks = {one.name: one for one in all_checks(CPU, "model", world.size) if one.ranks == world.size}
    found = {name: failed(check, trial) for name, check in checks.items()}
    for fault in faults:
        name = next(name for name in checks if FAULTS[fault].check in name)
        with injected(fault, CPU):
            found[fault] = failed(checks[name], trial)
    return found


@pytest.mark.slow
@pytest.mark.msrun
def test_faults_between_ranks_are_named(tmp_path):
    results = run_workers(2, __file__, "with_faults", faults=RANKED, folder=str(tmp_path))
    for found in results:
        assert {name: parts for name, parts in found.items() if name not in RANKED and parts} == {}
    for fault in RANKED:
        parts = [part for found in results for part in found[fault]]
        assert any(FAULTS[fault].part in part for part in parts), (fault, parts)


def run_kit(folder: Path, *words: str) -> tuple[int, dict]:
    code = cli.main(["acceptance", "--device", CPU.name, "--output", str(folder), *words])
    return code, json.loads((folder / "acceptance.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize("name", ENDING)
def test_a_process_that_is_lost_is_a_row_and_the_next_check_runs(tmp_path, name):
    words = ("--level", "operators", "--ranks", "1", "--only", "norm", "adamw", "--timeout_s", "30")
    code, report = run_kit(tmp_path, *words, "--inject", name)
    assert code == 1
    results = {one["check"]: one for one in report["results"]}
    lost = [check for check, one in results.items() if not one["passed"]]
    assert lost == [check for check in results if check.startswith("squared_norm")]
    note = results[lost[0]]["findings"][-1]["note"]
    assert ("SIGKILL" if name == "lost_process" else "no finding for 30 s") in note
    assert results["adamw float32"]["passed"]


@pytest.mark.slow
@pytest.mark.parametrize("name", WHOLE)
def test_a_fault_in_a_command_is_named(tmp_path, name):
    word = FAULTS[name].check
    code, report = run_kit(tmp_path, "--level", "run", "--ranks", "1", "--only", word, "--inject", name)
    assert code == 1
    failed_parts = [
        finding["part"] for one in report["results"] for finding in one["findings"] if not finding["passed"]
    ]
    assert any(FAULTS[name].part in part for part in failed_parts)


@pytest.mark.slow
def test_the_kit_passes_on_the_cpu(tmp_path):
    code, report = run_kit(tmp_path, "--level", "run")
    wrong = [one["check"] for one in report["results"] if not one["passed"]]
    assert (code, wrong) == (0, [])
    assert report["seconds"] < 900
    assert np.isfinite([one["seconds"] for one in report["results"]]).all()
