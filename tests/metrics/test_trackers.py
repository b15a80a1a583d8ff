"""Trackers: how they are called, by stand-ins; and they themselves, offline, where they are installed."""

import os
import sys
import time

import pytest
from tracking_package import StandIn

from mindrlhf.configs.tracking import TrackingSettings
from mindrlhf.errors import UserError
from mindrlhf.metrics.trackers import TrackerWriter


def tracking(offline):
    return TrackingSettings(project_name="project", experiment_name="first", trackers_offline=offline)


TRACKERS = [
    ("wandb", {"name": "first", "dir": "{}"}),
    ("swanlab", {"experiment_name": "first", "logdir": "{}"}),
]
ALL = ["wandb", "swanlab", "trackio", "mlflow"]


@pytest.fixture(autouse=True)
def _no_servers(monkeypatch):
    for key in ("MLFLOW_TRACKING_URI", "TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL"):
        monkeypatch.delenv(key, raising=False)


@pytest.mark.parametrize(("name", "names"), TRACKERS)
@pytest.mark.parametrize(("offline", "mode"), [(True, "offline"), (False, None)])
def test_a_run_is_begun_logged_and_finished(tmp_path, monkeypatch, name, names, offline, mode):
    tracker = StandIn()
    monkeypatch.setitem(sys.modules, name, tracker)
    run = TrackerWriter(name, tmp_path / "run", tracking(offline), {"lr": 1e-6})
    run.write(3, {"a": 1.0})
    run.close()
    own = {key: value.format(tmp_path / "run") for key, value in names.items()}
    assert tracker.started == {"project": "project", "config": {"lr": 1e-6}, "mode": mode, **own}
    assert tracker.logged == [(3, {"a": 1.0})]
    assert tracker.finished


@pytest.mark.parametrize("offline", [True, False])
def test_trackio_is_local_or_where_its_variables_say(tmp_path, monkeypatch, offline):
    tracker = StandIn()
    monkeypatch.setitem(sys.modules, "trackio", tracker)
    monkeypatch.setenv("TRACKIO_SPACE_ID", "me/space")
    run = TrackerWriter("trackio", tmp_path, tracking(offline), {"lr": 1e-6})
    run.write(3, {"a": 1.0})
    run.close()
    assert tracker.started == {"project": "project", "name": "first", "config": {"lr": 1e-6}}
    assert os.environ.get("TRACKIO_SPACE_ID") == (None if offline else "me/space")
    assert tracker.logged == [(3, {"a": 1.0})]
    assert tracker.finished


class Mlflow:
    """Records the calls of MLflow's functions in order."""

    def __init__(self):
        self.calls = []

    def __getattr__(self, name):
        return lambda *given, **named: self.calls.append((name, *given, *named.items()))


@pytest.mark.parametrize("offline", [True, False])
@pytest.mark.parametrize("server", [None, "http://127.0.0.1:1"])
def test_mlflow_is_local_unless_its_variable_names_a_server(tmp_path, monkeypatch, offline, server):
    package = Mlflow()
    monkeypatch.setitem(sys.modules, "mlflow", package)
    if server:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", server)
    run = TrackerWriter("mlflow", tmp_path / "run", tracking(offline), {"lr": 1e-6})
    run.write(3, {"val-core/pass@4": 1.0})
    run.close()
    local = [("set_tracking_uri", f"sqlite:///{tmp_path}/run/mlflow.db")]
    assert package.calls == [
        *(local if offline or not server else []),
        ("set_experiment", "project"),
        ("start_run", ("run_name", "first")),
        ("log_params", {"lr": 1e-6}),
        ("log_metrics", {"val-core/pass_at_4": 1.0}, ("step", 3)),
        ("end_run",),
    ]


@pytest.mark.parametrize("name", ALL)
def test_a_tracker_that_cannot_start_says_why_in_one_sentence(tmp_path, monkeypatch, name):
    tracker = StandIn(RuntimeError("No API key configured.\nUse login."))
    tracker.set_tracking_uri = lambda _: tracker.init()
    monkeypatch.setitem(sys.modules, name, tracker)
    with pytest.raises(UserError, match=rf"^{name} cannot start a run \(No API key configured\): log in .*offline"):
        TrackerWriter(name, tmp_path, tracking(False))


@pytest.mark.parametrize("name", ALL)
def test_the_tracker_itself_offline(tmp_path, monkeypatch, name):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "run"))  # which trackio reads when it is imported
    pytest.importorskip(name)
    monkeypatch.chdir(tmp_path)
    run = TrackerWriter(name, tmp_path / "run", tracking(True), {"lr": 1e-6})
    run.write(1, {"critic/rewards/mean": 0.5, "actor/loss": float("nan")})
    run.write(4, {"critic/rewards/mean": 0.75})
    run.close()
    # wandb's own process may still be writing; nothing here but pytest's limit ends the wait for it.
    file = {"trackio": "project.db", "mlflow": "mlflow.db"}.get(name, f"*.{name}")
    while not (written := [path for path in (tmp_path / "run").rglob(file) if path.stat().st_size > 100]):
        time.sleep(0.1)
    assert len(written) == 1
