"""wandb and SwanLab: how they are called, by stand-ins; and they themselves, offline, where they are installed."""

import sys
import time
from types import SimpleNamespace

import pytest

from mindrlhf.configs.tracking import TrackingSettings
from mindrlhf.errors import UserError
from mindrlhf.metrics.writers import TrackerWriter


class StandIn:
    """Records what a tracker is asked to do; `trouble` is raised when a run is begun."""

    def __init__(self, trouble=None):
        self.started, self.logged, self.finished, self.trouble = None, [], False, trouble

    def init(self, **arguments):
        if self.trouble:
            raise self.trouble
        self.started = arguments
        return SimpleNamespace(log=lambda values, step: self.logged.append((step, values)), finish=self.finish)

    def finish(self):
        self.finished = True


def tracking(offline):
    return TrackingSettings(project_name="project", experiment_name="first", trackers_offline=offline)


TRACKERS = [
    ("wandb", {"name": "first", "dir": "{}"}),
    ("swanlab", {"experiment_name": "first", "logdir": "{}"}),
]


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


@pytest.mark.parametrize(("name", "names"), TRACKERS)
def test_a_tracker_that_cannot_start_says_why_in_one_sentence(tmp_path, monkeypatch, name, names):
    monkeypatch.setitem(sys.modules, name, StandIn(RuntimeError("No API key configured.\nUse login.")))
    with pytest.raises(UserError, match=rf"^{name} cannot start a run \(No API key configured\): log in .*offline"):
        TrackerWriter(name, tmp_path, tracking(False))


@pytest.mark.parametrize(("name", "names"), TRACKERS)
def test_the_tracker_itself_offline(tmp_path, monkeypatch, name, names):
    pytest.importorskip(name)
    monkeypatch.chdir(tmp_path)
    run = TrackerWriter(name, tmp_path / "run", tracking(True), {"lr": 1e-6})
    run.write(1, {"critic/rewards/mean": 0.5, "actor/loss": float("nan")})
    run.write(4, {"critic/rewards/mean": 0.75})
    run.close()
    end = time.monotonic() + 30  # wandb's own process may still be writing
    while not (written := [path for path in (tmp_path / "run").rglob(f"*.{name}") if path.stat().st_size > 100]):
        assert time.monotonic() < end, "nothing was written"
        time.sleep(0.1)
    assert len(written) == 1
