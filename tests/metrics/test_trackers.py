"""wandb and SwanLab: how they are called, by stand-ins; and they themselves, offline, where they are installed."""

import sys
import time
from types import SimpleNamespace

import pytest

from mindrlhf.errors import UserError
from mindrlhf.metrics.trackers import swanlab_writer, wandb_writer


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


TRACKERS = [
    ("wandb", wandb_writer, {"name": "first", "dir": "{}"}),
    ("swanlab", swanlab_writer, {"experiment_name": "first", "logdir": "{}"}),
]


@pytest.mark.parametrize(("name", "writer", "names"), TRACKERS)
@pytest.mark.parametrize(("offline", "mode"), [(True, "offline"), (False, None)])
def test_a_run_is_begun_logged_and_finished(tmp_path, monkeypatch, name, writer, names, offline, mode):
    tracker = StandIn()
    monkeypatch.setitem(sys.modules, name, tracker)
    run = writer(tmp_path / "run", "project", "first", {"lr": 1e-6}, offline)
    run.write(3, {"a": 1.0})
    run.close()
    own = {key: value.format(tmp_path / "run") for key, value in names.items()}
    assert tracker.started == {"project": "project", "config": {"lr": 1e-6}, "mode": mode, **own}
    assert tracker.logged == [(3, {"a": 1.0})]
    assert tracker.finished


@pytest.mark.parametrize(("name", "writer", "names"), TRACKERS)
def test_a_tracker_that_cannot_start_says_why_in_one_sentence(tmp_path, monkeypatch, name, writer, names):
    monkeypatch.setitem(sys.modules, name, StandIn(RuntimeError("No API key configured.\nUse login.")))
    with pytest.raises(UserError, match=rf"^{name} cannot start a run \(No API key configured\): log in .*offline"):
        writer(tmp_path, "project")


@pytest.mark.parametrize(("name", "writer", "names"), TRACKERS)
def test_the_tracker_itself_offline(tmp_path, monkeypatch, name, writer, names):
    pytest.importorskip(name)
    monkeypatch.chdir(tmp_path)
    run = writer(tmp_path / "run", "project", "first", {"lr": 1e-6}, offline=True)
    run.write(1, {"critic/rewards/mean": 0.5, "actor/loss": float("nan")})
    run.write(4, {"critic/rewards/mean": 0.75})
    run.close()
    end = time.monotonic() + 30  # wandb's own process may still be writing
    while not (written := [path for path in (tmp_path / "run").rglob(f"*.{name}") if path.stat().st_size > 100]):
        assert time.monotonic() < end, "nothing was written"
        time.sleep(0.1)
    assert len(written) == 1
