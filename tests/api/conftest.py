"""A practice task with its tokenizer, and the smallest model, which the trainers of this folder share."""

import jobs
import pytest


@pytest.fixture(scope="session")
def task(tmp_path_factory) -> jobs.Task:
    return jobs.make_task(tmp_path_factory.mktemp("task"))


@pytest.fixture(scope="session")
def model(task, tmp_path_factory):
    return jobs.write_model(task, tmp_path_factory.mktemp("model") / "hf", num_layers=1)
