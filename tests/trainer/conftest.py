"""The practice task, and the step of experiences, that tests of this folder share."""

import jobs
import numpy as np
import pytest
from step_parts import experience


@pytest.fixture(scope="session")
def task(tmp_path_factory) -> jobs.Task:
    return jobs.make_task(tmp_path_factory.mktemp("task"))


@pytest.fixture
def step():
    """Four groups of three responses with everything that an advantage may ask for."""
    rng = np.random.default_rng(3)
    experiences = []
    for index in range(4):
        lengths = rng.integers(1, 7, 3)
        rows = lambda scale, lengths=lengths: tuple(  # noqa: E731
            rng.normal(scale=scale, size=n).astype(np.float32) for n in lengths
        )
        rewards = rng.integers(0, 3, 3)
        experiences.append(
            experience(
                index,
                rewards,
                lengths,
                functions={"gsm8k": rewards % 2, "format": rewards // 2},
                greedy_reward=float(index),
                values=rows(0.3),
                reference_log_probs=tuple(row - 1 for row in rows(0.5)),
                old_log_probs=tuple(row - 1 for row in rows(0.5)),
            )
        )
    return experiences
