"""A practice task with its tokenizer, and the smallest model, which the trainers of this folder share."""

from dataclasses import replace

import jobs
import pytest

from mindrlhf.api.trainer import Trainer


@pytest.fixture(scope="module", autouse=True)
def _shared_graphs():
    """Trainers find the graphs of earlier ones, and of commands."""
    flags = Trainer._flags

    def keeping(*given, **named):
        return replace(flags(*given, **named), enable_compile_cache=True)

    with pytest.MonkeyPatch.context() as patch, jobs.tests_are_no_users():
        patch.setattr(Trainer, "_flags", keeping)
        yield


@pytest.fixture(scope="session")
def task(tmp_path_factory) -> jobs.Task:
    return jobs.make_task(tmp_path_factory.mktemp("task"), layers=1)


@pytest.fixture(scope="session")
def model(task, tmp_path_factory):
    return jobs.write_model(task, tmp_path_factory.mktemp("model") / "hf", num_layers=1)
