import sys

import pytest
from tracking_package import StandIn

from mindrlhf.configs.loading import load_grpo_config
from mindrlhf.configs.tracking import TrackingSettings
from mindrlhf.errors import UserError
from mindrlhf.metrics.writers import open_writers, read_metrics


def test_every_file_of_a_run_and_its_resume(tmp_path, capsys):
    tracking = TrackingSettings(loggers=("console", "jsonl", "tensorboard"))
    with open_writers(tmp_path, tracking, total_steps=3) as writers:
        for step, reward in ((1, 0.25), (2, 0.75), (3, 0.0)):
            writers.write(step, {"critic/rewards/mean": reward})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.jsonl", "tensorboard"]
    capsys.readouterr()
    with open_writers(tmp_path, tracking, total_steps=3, start_step=3) as writers:
        writers.write(3, {"critic/rewards/mean": 1.0})
    assert [row["critic/rewards/mean"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [0.25, 0.75, 1.0]
    assert capsys.readouterr().out.split()[-3:] == ["3/3", "1.00", "+0.75"], "the trend goes back to before the resume"


def test_unknown_logger():
    with pytest.raises(UserError, match=r"trainer\.loggers.* 'jsonl'"):
        load_grpo_config(None, ["trainer.loggers=[jsonlines]"])


def test_csv_is_made_from_jsonl():
    with pytest.raises(UserError, match=r"trainer\.loggers.*csv.*take jsonl.*pandas.read_json.*to_csv"):
        load_grpo_config(None, ["trainer.loggers=[console,csv]"])


@pytest.mark.parametrize("name", ["wandb", "swanlab"])
def test_trackers_get_what_the_settings_say(tmp_path, monkeypatch, name):
    tracker = StandIn()
    monkeypatch.setitem(sys.modules, name, tracker)
    tracking = TrackingSettings(loggers=(name,), project_name="p", experiment_name="e", trackers_offline=True)
    open_writers(tmp_path, tracking, total_steps=1, settings={"lr": 1}).close()
    given = tracker.started
    assert {"p", "e", "offline"} <= {value for value in given.values() if isinstance(value, str)}
    assert given["config"] == {"lr": 1}


@pytest.mark.parametrize("name", ["wandb", "swanlab", "mlflow", "trackio"])
def test_an_absent_tracker_leaves_earlier_files_alone(tmp_path, monkeypatch, name):
    with open_writers(tmp_path, TrackingSettings(loggers=("jsonl",)), total_steps=1) as writers:
        writers.write(1, {"a": 1.0})
    monkeypatch.setitem(sys.modules, name, None)  # what Python does for a package that cannot be imported
    with pytest.raises(UserError, match=f"pip install {name}"):
        open_writers(tmp_path, TrackingSettings(loggers=("jsonl", name)), total_steps=1)
    assert read_metrics(tmp_path / "metrics.jsonl") == [{"step": 1, "a": 1.0}]


def test_what_was_opened_is_closed_when_another_refuses(tmp_path, monkeypatch):
    tracker = StandIn()
    monkeypatch.setitem(sys.modules, "wandb", tracker)
    (tmp_path / "tensorboard").write_text("a file in the folder's place")
    with pytest.raises(UserError, match="cannot create the folder"):
        open_writers(tmp_path, TrackingSettings(loggers=("tensorboard", "wandb")), total_steps=3)
    assert tracker.finished
