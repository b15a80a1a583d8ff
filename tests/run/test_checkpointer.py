"""When a run is saved, what is restored, and how it ends before its last step; without a model."""

import json

import jobs
import numpy as np
import pytest
from mindspore import Parameter, Tensor
from sharded_files import layout_of
from step_parts import an_update
from training_states import TOKEN, arrays_of

from mindrlhf import backend
from mindrlhf.backend.comm.collectives import Collectives
from mindrlhf.backend.process.launch import World
from mindrlhf.checkpoint.finite import first_not_finite
from mindrlhf.checkpoint.resume import Checkpoint, choose, locate
from mindrlhf.checkpoint.store import CheckpointStore
from mindrlhf.configs.grpo import TrainerSettings
from mindrlhf.errors import UserError
from mindrlhf.optimizer_state import SCALES, decode
from mindrlhf.parallel.layout import full_layout
from mindrlhf.run import checkpointer
from mindrlhf.run.checkpointer import Checkpointer, Managed
from mindrlhf.run.stop_signals import Stopped, StopSignals
from mindrlhf.training.moments import Moments


class Counter:
    """Something with state that every step changes; also as bulk."""

    def __init__(self):
        self.value = 0

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]

    def snapshot(self):
        return self.value

    def encode(self, snapshot):
        return str(snapshot).encode()

    def decode(self, content):
        self.value = int(content)


class Run:
    """A checkpointer over small arrays that count the steps, and what may ask it to stop.

    others: there is another rank, which is asked to, and which alone holds arrays `critic` and a counter of them.
    """

    def __init__(self, folder, total=6, others=False, **settings):
        settings = TrainerSettings(**settings)
        self.signals = StopSignals()
        self.parameters = {
            kind: {name: Parameter(Tensor(array), name=f"{kind}.{name}") for name, array in named.items()}
            for kind, named in arrays_of(0).items()
        }
        self.counter, self.bulk = Counter(), Counter()
        self.folder = folder
        self.flushed = []  # the checkpoints that there were each time
        writing = {"keep": settings.save_max_ckpt_num, "asynchronous": settings.async_save}
        writing["implied"] = lambda: self.flushed.append(self.steps())
        self.store = CheckpointStore(folder, 0, (0,), TOKEN, **writing)
        collectives = Collectives(World(0, 2 if others else 1, "CPU"))
        if others:
            collectives.all_reduce_max = lambda own, group=None: np.maximum(own, 1.0)
            more = {"critic": full_layout({"w": (2, 2)}, 1)}, {"counter": {"value": -1}, "critic": {"value": 7}}
            collectives.all_gather_object = lambda own, group=None: [own, more["counter" in own]]
        groups = self.groups = {kind: (layout_of(), named) for kind, named in self.parameters.items()}
        stateful, bulk, hf = {"counter": self.counter}, {"bulk": self.bulk}, {"config.json": b"{}"}
        self.checkpointer = Checkpointer(settings, total, self.store, self.signals, collectives)
        self.checkpointer.manage(Managed(groups, stateful, bulk, {}, hf))

    def step(self, step, metrics=None, failed=False):
        """What a step does: everything moves, then the checkpointer looks."""
        self.store.settle()
        for named in self.parameters.values():
            for parameter in named.values():
                backend.write(parameter, backend.read(parameter) + 1)
        self.counter.value, self.bulk.value = step, 10 * step
        self.checkpointer.after_step(step, metrics or {}, [an_update(failed)])

    def steps(self):
        return sorted(int(path.name[5:]) for path in self.folder.glob("step_*"))


def test_saved_every_so_often_and_at_the_end(tmp_path):
    run = Run(tmp_path, total=7, save_freq=3)
    saved = []
    for step in range(1, 8):
        run.step(step)
        saved += [run.checkpointer.saved] if run.checkpointer.saved else []
    run.checkpointer.finish()
    assert run.steps() == [3, 6, 7]
    assert saved == [tmp_path / f"step_00000{step}" for step in (3, 6, 7)]
    never = Run(tmp_path / "none", total=2)
    never.step(1)
    never.step(2)
    assert never.steps() == []


@pytest.mark.usefixtures("memory")
@pytest.mark.parametrize("async_save", [False, True])
def test_a_resumed_run_has_everything(tmp_path, async_save):
    run = Run(tmp_path, save_freq=2, async_save=async_save)
    for step in (1, 2, 3, 4):
        run.step(step)
    run.checkpointer.finish()
    other = Run(tmp_path, save_freq=2)
    checkpoint, _ = choose(locate(tmp_path))
    other.checkpointer.restore(checkpoint, 0)
    assert other.checkpointer.first_step == 5
    assert (other.counter.value, other.bulk.value) == (4, 40)
    for kind in ("exp_avg", "exp_avg_sq"):  # the weights are read when they are made
        for name, parameter in run.parameters[kind].items():
            assert backend.read(other.parameters[kind][name]).tobytes() == backend.read(parameter).tobytes()


class RoundedRun(Run):
    """A run whose moments have fewer bits."""

    def __init__(self, folder, state, **settings):
        super().__init__(folder, **settings)
        names = list(self.parameters["model"])
        self.moments = Moments(state, list(self.parameters["model"].values()))
        pairs = zip(("exp_avg", "exp_avg_sq"), self.moments.named(names), strict=True)
        self.groups |= {kind: (layout_of(), named) for kind, named in pairs}
        self.checkpointer.manage(Managed(self.groups, {"counter": self.counter}, {"bulk": self.bulk}, {}, {}))

    def values(self):
        """Both moments by name, float32; the second as kinds of its own."""
        found = {}
        for kind, (layout, named) in self.groups.items():
            if kind != "model":
                for name in layout.placements:
                    numbers, scales = backend.read(named[name]), named.get(f"{name}{SCALES}")
                    values = numbers.astype(np.float32) if scales is None else decode(numbers, backend.read(scales))
                    found[kind, name] = np.array(values)
        return found


@pytest.mark.usefixtures("memory")
@pytest.mark.parametrize(("state", "error"), [("bfloat16", 2.0**-8), ("int8", 1 / 15)])
def test_moments_of_another_form_are_converted(tmp_path, caplog, state, error):
    """From float32 to the nearest numbers; back without loss, and in their own form without a word."""
    run = Run(tmp_path / "a", save_freq=1)
    run.step(1)
    run.checkpointer.finish()
    (float32,) = locate(tmp_path / "a")
    other = RoundedRun(tmp_path / "b", state, save_freq=1)
    other.checkpointer.restore(Checkpoint.open(float32), 0)
    assert f"its moments are float32, and optimizer.state is {state}: they are converted." in caplog.text
    for (kind, name), found in other.values().items():
        expected = backend.read(run.parameters[kind][name])
        assert (np.abs(found - expected) <= error * np.abs(expected)).all()
        assert found.ndim > 1 or (found == expected).all()
    other.checkpointer.after_step(2, {}, [an_update(False)])
    other.checkpointer.finish()
    (rounded,) = locate(tmp_path / "b")
    sizes = [(folder / "rank_0" / "exp_avg.safetensors").stat().st_size for folder in (float32, rounded)]
    assert sizes[1] < {"bfloat16": 0.7, "int8": 0.6}[state] * sizes[0]
    caplog.clear()
    again = RoundedRun(tmp_path / "c", state)
    again.checkpointer.restore(Checkpoint.open(rounded), 0)
    assert not caplog.text
    back = Run(tmp_path / "d")
    back.checkpointer.restore(Checkpoint.open(rounded), 0)
    assert f"its moments are {state}, and optimizer.state is float32: they are converted." in caplog.text
    for (kind, name), expected in other.values().items():
        assert again.values()[kind, name].tobytes() == expected.tobytes()
        assert backend.read(back.parameters[kind][name]).tobytes() == expected.tobytes()


@pytest.mark.parametrize(
    ("name", "state"),
    [
        ("counter", 3),
        ("counter", {}),
        ("counter", {"value": "3"}),
        ("counter", {"value": -3}),
        ("counter", {"value": True}),
        ("counter", {"value": 10**400}),
        ("bad_updates", {"in_row": [1]}),
        ("bad_updates", {"in_row": float("nan")}),
        ("best", {"metric": None, "value": {}, "step": None}),
    ],
)
def test_counters_that_no_run_saves(tmp_path, name, state):
    run = Run(tmp_path, save_freq=1)
    run.step(1)
    checkpoint, _ = choose(locate(tmp_path))
    checkpoint.counters[name] = state
    with pytest.raises(UserError, match=rf"state\.json: does not hold what a run saves \(counters\.{name}: ValueError"):
        run.checkpointer.restore(checkpoint, 0)


def test_a_bulky_state_that_no_run_saves(tmp_path):
    run = Run(tmp_path, save_freq=1)
    run.step(1)
    checkpoint, _ = choose(locate(tmp_path))
    (checkpoint.folder / "bulk").write_bytes(b"no number")
    with pytest.raises(UserError, match=r"does not hold what a run saves \(the file bulk: ValueError"):
        run.checkpointer.restore(checkpoint, 0)


@pytest.mark.parametrize(("mode", "kept"), [("max", 2), ("min", 3)])
def test_the_best_step_is_kept(tmp_path, mode, kept):
    settings = {"save_best_metric": "val-core/x/acc/mean@1", "save_best_mode": mode, "save_max_ckpt_num": 1}
    run = Run(tmp_path, **settings)
    for step, value in enumerate((0.4, 0.9, 0.1, 0.5, None, float("nan")), start=1):
        run.step(step, {"actor/loss": 1.0} if value is None else {settings["save_best_metric"]: value})
    assert locate(tmp_path / "best")[0].name == f"step_00000{kept}"


@pytest.mark.parametrize("async_save", [False, True])
def test_what_a_checkpoint_vouches_for_is_written_before_it(tmp_path, async_save):
    run = Run(tmp_path, save_freq=2, async_save=async_save, save_max_ckpt_num=9)
    for step in range(1, 5):
        run.step(step)
    run.checkpointer.finish()
    assert run.flushed == [[], [2]]


WATCHED = {"save_best_metric": "val/loss", "save_best_mode": "min", "early_stop_patience": 2}


def test_patience_ends_a_run_across_a_resume(tmp_path):
    """Only steps that measure count, and a value that is not finite is no better one."""
    run = Run(tmp_path, total=9, save_freq=4, **WATCHED)
    for step, value in enumerate((3.0, None, 2.0, float("nan")), start=1):
        run.step(step, {"train/loss": 1.0} if value is None else {"val/loss": value})
    assert not run.checkpointer.over
    resumed = Run(tmp_path, total=9, save_freq=4, **WATCHED)
    resumed.checkpointer.restore(choose(locate(tmp_path))[0], 0)
    resumed.step(5, {"val/loss": 2.0})
    assert resumed.checkpointer.over
    assert resumed.steps() == [1, 3, 4, 5], "the best ones, every fourth, and the last one"
    found = "early stop after step 5 of 9: 2 measurements without a better one; val/loss was best in step 3 (2)"
    assert resumed.checkpointer.early_end == found
    finished = Run(tmp_path, total=9, save_freq=4, **WATCHED)
    finished.checkpointer.restore(choose(locate(tmp_path))[0], 0)
    assert finished.checkpointer.early_end == found


def test_no_patience_is_no_end(tmp_path):
    run = Run(tmp_path, total=3, **{**WATCHED, "early_stop_patience": None})
    for step in (1, 2, 3):
        assert not run.checkpointer.over
        run.step(step, {"val/loss": 1.0})
    assert run.checkpointer.over
    assert run.checkpointer.early_end is None


@pytest.mark.usefixtures("memory")
def test_the_best_weights_come_back(tmp_path):
    run = Run(tmp_path, **{**WATCHED, "save_best_mode": "max"})
    run.checkpointer.load_best(0)  # there is none yet
    first = {name: backend.read(one).copy() for name, one in run.parameters["model"].items()}
    for step, value in enumerate((1.0, 7.0, 5.0), start=1):
        run.step(step, {"val/loss": value})
    moments = {name: backend.read(one).copy() for name, one in run.parameters["exp_avg"].items()}
    run.checkpointer.finish()
    run.checkpointer.load_best(0)
    for name, parameter in run.parameters["model"].items():
        np.testing.assert_array_equal(backend.read(parameter), first[name] + 2)
    for name, parameter in run.parameters["exp_avg"].items():
        np.testing.assert_array_equal(backend.read(parameter), moments[name])
    (tmp_path / "step_000002" / "manifest.json").unlink()
    with pytest.raises(UserError, match="step_000002"):
        run.checkpointer.load_best(0)


def test_a_best_metric_that_does_not_exist(tmp_path):
    run = Run(tmp_path, save_best_metric="critic/reward/mean")
    with pytest.raises(UserError, match=r"there is no such metric; did you mean critic/rewards/mean\?"):
        run.step(1, {"critic/rewards/mean": 1.0, "actor/loss": 0.0})


def test_a_wish_to_stop_after_a_step(tmp_path):
    run = Run(tmp_path)
    run.step(1)
    run.signals.reason = "a signal"
    run.step(2)
    with pytest.raises(Stopped, match=r"after step 2 of 6 is saved in .*--resume_training auto"):
        run.checkpointer.between_phases()
    assert run.steps() == [2]


def test_a_wish_to_stop_after_the_last_step_comes_too_late(tmp_path):
    run = Run(tmp_path, total=1)
    run.step(1)
    run.signals.reason = "a signal"
    run.checkpointer.between_phases()
    assert run.checkpointer.saved is None


def test_a_step_that_is_left_half_way_is_not_saved(tmp_path):
    """What has moved since the last step's end is not in the checkpoint."""
    run = Run(tmp_path, save_freq=5)
    run.step(1)
    run.counter.value, run.bulk.value = 99, 99
    run.checkpointer.within_phase()
    run.signals.reason = "a signal"
    with pytest.raises(Stopped, match="after step 1 of 6"):
        run.checkpointer.within_phase()
    checkpoint, _ = choose(locate(tmp_path))
    assert (checkpoint.step, checkpoint.counters["counter"], checkpoint.companion("bulk")) == (1, {"value": 1}, b"10")


def test_nothing_to_save_before_the_first_step(tmp_path):
    run = Run(tmp_path)
    run.signals.reason = "a signal"
    with pytest.raises(Stopped, match="nothing to save; start again with the same command"):
        run.checkpointer.between_phases()
    assert run.steps() == []


def test_updates_that_cannot_be_applied(tmp_path):
    """Counted in a row, across a resume too; the state is saved when the run stops."""
    run = Run(tmp_path, max_bad_updates=3, save_freq=1)
    for step, failed in enumerate((True, True, False, True, True), start=1):
        run.step(step, failed=failed)
    run.checkpointer.finish()
    resumed = Run(tmp_path, max_bad_updates=3)
    resumed.checkpointer.restore(choose(locate(tmp_path))[0], 0)
    with pytest.raises(UserError, match=r"step 6: 3 updates in a row were skipped.*after step 6 of 6 is saved"):
        resumed.step(6, failed=True)
    assert resumed.steps()[-1] == 6


@pytest.mark.parametrize("kind", ["model", "critic"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_spoiled_weights_replace_no_good_ones(tmp_path, kind, value):
    run = Run(tmp_path, save_freq=1)
    run.parameters["critic"] = {
        name: Parameter(Tensor(backend.read(parameter)), name=f"critic.{name}")
        for name, parameter in run.parameters["model"].items()
    }
    run.groups["critic"] = (layout_of(), run.parameters["critic"])
    run.step(1)
    *_, (last, parameter) = run.parameters[kind].items()
    array = np.array(backend.read(parameter))
    array.reshape(-1)[-1] = value
    backend.write(parameter, array)
    before = jobs.files(tmp_path)
    with pytest.raises(UserError, match=rf"step 2: the {kind}'s parameter {last} holds NaN .*step_000001 is whole"):
        run.step(2)
    assert jobs.files(tmp_path) == before
    run.signals.reason = "a signal"
    with pytest.raises(UserError, match=r"lower optimizer\.lr"):  # a wish to stop saves it no more than a step does
        run.checkpointer.between_phases()


def test_the_first_parameter_of_all_ranks_is_named():
    names = ["a", "b", "c", "d"]
    good, large = np.zeros((2, 3), np.float32), np.full(8, 3e38, np.float32)
    bad = np.array([1.0, np.nan, 2.0], np.float32)

    def ranks(*others):
        """All ranks' maximum, where the others have found these places."""
        return lambda own: np.maximum(own, max((-place for place in others), default=own))

    assert first_not_finite({"a": good, "b": large}, names, ranks()) is None, "a sum may overflow by itself"
    assert first_not_finite({"a": good, "c": bad, "d": bad}, names, ranks()) == "c"
    assert first_not_finite({"a": good, "c": bad}, names, ranks(1)) == "b"
    assert first_not_finite({"a": good}, names, ranks(3, 4)) == "d"


def test_too_much_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpointer, "resident_bytes", lambda: 3 << 30)
    run = Run(tmp_path, max_host_memory_gb=4)
    run.step(1)
    monkeypatch.setattr(checkpointer, "resident_bytes", lambda: 5 << 30)
    with pytest.raises(UserError, match=r"uses 5.0 GiB, and trainer.max_host_memory_gb is 4; .* is saved in"):
        run.step(2)
    assert run.steps() == [2]


def test_what_only_another_rank_holds_is_in_the_checkpoint(tmp_path):
    run = Run(tmp_path, save_freq=1, others=True)
    run.checkpointer._reduce_max = lambda own, group=None: own  # nothing is asked, or not finite
    run.step(1)
    state = json.loads((run.store.folder / "step_000001" / "state.json").read_text())
    assert set(state["groups"]) == {*run.groups, "critic"}
    assert [state["counters"][name] for name in ("counter", "critic")] == [{"value": 1}, {"value": 7}]


def test_one_rank_stops_all(tmp_path):
    run = Run(tmp_path, others=True)
    run.signals.reason = "a signal"
    run.checkpointer.within_phase()  # the others would wait for this one
    run.signals.reason = None
    with pytest.raises(Stopped):
        run.checkpointer.between_phases()
