"""The faulty reward functions as a file, and a look at what they leave."""

import psutil
import pytest
from reward_pools import FAULTS, command


@pytest.fixture
def faults(tmp_path):
    path = tmp_path / "faults.py"
    path.write_text(FAULTS)
    return path


@pytest.fixture(autouse=True)
def _no_process_is_left():
    yield
    left = [
        child for child in psutil.Process().children(recursive=True) if "mindrlhf.rewards" in "".join(command(child))
    ]
    assert left == []
