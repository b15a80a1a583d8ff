"""MindFormers as a second opinion in the kit: it agrees, and a difference says whose it is."""

import pytest

from mindrlhf.acceptance import catalogue, oracle
from mindrlhf.acceptance.checks import Trial
from mindrlhf.backend.devices import find_device
from mindrlhf.backend.process.launch import launch
from mindrlhf.models.parameters import parameter_table


@pytest.fixture
def trial(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # importing mindformers writes a log folder
    pytest.importorskip("mindformers")
    launch("CPU")
    return Trial(find_device("CPU"), tmp_path)


@pytest.mark.slow
def test_it_is_asked_in_the_dtypes_of_activations(monkeypatch):
    """A CPU with bfloat16 products has float32 between them, and MindFormers has no operators there for bfloat16."""
    pytest.importorskip("mindformers")
    monkeypatch.setattr(catalogue, "offered_dtypes", lambda device: list(device.product_dtypes))
    names = [one.name for one in catalogue.all_checks(find_device("CPU"), "model", 2) if "MindFormers" in one.name]
    assert names == ["qwen2 beside MindFormers float32"]


def test_mindformers_agrees_with_float64_and_ours(trial):
    findings = list(oracle.check_oracle("float32", trial))
    assert [one.part for one in findings if not one.passed] == []
    count = len(parameter_table(oracle.tiny_models()["qwen2"])) + 2
    for whose in ("MindFormers and float64: ", "ours and MindFormers: "):
        assert sum(one.part.startswith(whose) for one in findings) == count


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "failed"),
    [
        ("own_update", ["ours and MindFormers: loss"]),
        pytest.param("theirs", ["MindFormers and float64: loss", "ours and MindFormers: loss"], marks=pytest.mark.slow),
    ],
)
def test_a_difference_says_whose_it_is(trial, monkeypatch, name, failed):
    real = getattr(oracle, name)

    def wrong(*given, **options):
        found = real(*given, **options)
        one, *rest = found if name == "own_update" else (found,)
        changed = one._replace(loss=one.loss * 1.001)
        return (changed, *rest) if rest else changed

    monkeypatch.setattr(oracle, name, wrong)
    assert [one.part for one in oracle.check_oracle("float32", trial) if not one.passed] == failed
