"""Files of steps are on the disk before the checkpoint that implies them; the first error is the one that counts."""

import os
from contextlib import ExitStack

import pytest
from training_states import save, states, stores

from mindrlhf.errors import UserError
from mindrlhf.files import atomic
from mindrlhf.files.naming import step_path
from mindrlhf.run.outputs import Outputs
from mindrlhf.run.run import Run
from mindrlhf.run.step_report import StepReport


def test_what_a_checkpoint_implies_is_synced_before_it(tmp_path, monkeypatch):
    """Responses, held-out answers, parts of the record and metrics, each once; then the checkpoint gets its name."""
    done, sync, rename = [], atomic.sync, os.rename
    outputs, folder = Outputs(tmp_path, tmp_path / "r.parts"), tmp_path / "ckpt"
    implied = [
        step_path(tmp_path / "rollouts", 1, ".jsonl"),
        step_path(tmp_path / "validation", 0, ".jsonl"),
        step_path(tmp_path / "r.parts", 1, ".npz"),
        tmp_path / "metrics.jsonl",
    ]
    for path in implied:
        path.parent.mkdir(exist_ok=True)
        path.write_text("content")

    def recorded(path):
        done.append(path)
        sync(path)

    def renamed(source, target):
        done.append(target)
        rename(source, target)

    monkeypatch.setattr("mindrlhf.run.outputs.sync", recorded)
    monkeypatch.setattr(atomic, "sync", recorded)
    monkeypatch.setattr(os, "rename", renamed)
    save(stores(folder, implied=outputs.sync), states(1))
    place = done.index(folder / "step_000001")
    assert {*implied, *(path.parent for path in implied[:3])} <= set(done[:place])
    done.clear()
    save(stores(folder, implied=outputs.sync), states(2))
    assert [path for path in done if path in implied] == [tmp_path / "metrics.jsonl"]


@pytest.mark.parametrize("first", [None, UserError("step_000002: cannot be written (step_000001 is whole)")])
def test_an_error_of_closing_takes_no_other_ones_place(first, caplog):
    run = Run.__new__(Run)

    def close():
        raise UserError("rollouts.mindrecord: cannot be written")

    run.report = StepReport.__new__(StepReport)
    run.report.close = close

    def end():
        with ExitStack() as stack:
            stack.push(run._close_report)
            if first:
                raise first

    with pytest.raises(UserError) as caught:
        end()
    assert str(caught.value) == str(first or "rollouts.mindrecord: cannot be written")
    assert ("rollouts.mindrecord" in caplog.text) == (first is not None)
