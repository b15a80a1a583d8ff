"""Facts of a run's start, from whatever its settings file says."""

import pytest

from mindrlhf.report.facts import facts
from mindrlhf.report.run import RunOutputs

START = {"date": "2026-05-01T10:00:00+02:00", "host": "node7", "system": "Linux", "commit": "mine 0123456789ab+"}
SETTINGS = {
    "model": {"family": "qwen2", "num_layers": 24},
    "parameters": 494_032_768,
    "train_yaml": {"context": {"device_target": "CPU"}, "parallel": {"data_parallel": 2, "model_parallel": 2}},
    "flags": {"load_sft_checkpoint_infer": "/models/Qwen/Qwen2.5-0.5B", "mind_dataset_dir": "train.mindrecord"},
    "versions": {"mindrlhf": "1.0", "numpy": "2"},
}


def of(settings, *starts) -> dict[str, str]:
    return dict(facts(RunOutputs("a", None, [], None, settings, starts)))


def test_all_facts():
    assert of(SETTINGS, START) == {
        "started": "2026-05-01 10:00 UTC+02:00",
        "host": "node7, Linux",
        "model": "Qwen/Qwen2.5-0.5B, qwen2, 24 layers, 494.0M parameters",
        "data": "train.mindrecord",
        "layout": "CPU, 4 processes",
        "software": "mindrlhf 1.0",
        "commit": "mine 0123456789ab+",
    }


def test_a_resumed_run():
    again = START | {"date": "2026-05-03T08:30:00+02:00"}
    assert of({}, START, again)["started"].endswith("; resumed once, last 2026-05-03 08:30 UTC+02:00")
    assert "; resumed 2 times, last" in of({}, START, START, again)["started"]


@pytest.mark.parametrize(
    ("settings", "start"),
    [({}, {}), ({"parameters": "1" * 5000, "model": 3}, {"date": 7}), ({"train_yaml": []}, {"commit": None})],
)
def test_what_is_unknown_is_left_out(settings, start):
    assert of(settings, start) == {}
    assert of(settings) == {}


def test_random_weights():
    model = {"model": {"family": "qwen2", "num_layers": 2}}
    assert of(model)["model"] == "random weights, qwen2, 2 layers"
