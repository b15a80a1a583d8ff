"""Tools and an environment of the program: other processes import them by the names that the trainer finds."""

import json
import sys

import jobs
import pytest

from mindrlhf.api.objects import importable_names
from mindrlhf.environments.ready.calculator import calculator

DEFINITIONS = '''
from mindrlhf import GRPOConfig, GRPOTrainer


def add(first: int, second: int) -> int:
    """Add two numbers.

    Args:
        first: One of them.
        second: The other one.
    """
    return first + second


class Counter:
    def reset(self, **columns):
        self.turns = 0

    def reply(self, text: str) -> str | None:
        self.turns += 1
        return None if self.turns == 2 else "go on"

    def get_reward(self) -> float:
        return 10.0 * self.turns


def train():
    keys = {"per_device_train_batch_size": 4, "num_generations": 4, "max_completion_length": 40, "max_steps": 1}
    rollout = {"stop_strings": ["e", "3", "a", "1"]}
    args = GRPOConfig("run", **keys, temperature=3.0, report_to="none", disable_tqdm=True, rollout=rollout)
    rows = [{"prompt": [{"role": "user", "content": f"{number} + 1 ="}]} for number in range(4)]
    GRPOTrainer(MODEL, "environment", args, rows, GIVEN).train()


'''


@pytest.fixture
def script(model, tmp_path):
    """Write a script that trains with its own tool or environment."""

    def write(given, last):
        path = tmp_path / "script.py"
        path.write_text(DEFINITIONS.replace("MODEL", repr(str(model))).replace("GIVEN", given) + last)
        return path

    return write


@pytest.mark.slow
def test_a_script_s_own_environment(script, tmp_path):
    path = script("environment_factory=Counter", 'if __name__ == "__main__":\n    train()\n')
    run = jobs.start([], script=path, cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    settings = json.loads((tmp_path / "run" / "settings.json").read_text())["grpo"]
    assert settings["rollout"]["environment"] == f"{path}:Counter"
    (row,) = jobs.Run(tmp_path / "run").metrics
    assert row["conversation/lost"] == 0
    assert 10 < row["critic/rewards/mean"] <= 20, "some had two turns"


def test_a_script_that_trains_when_it_is_imported(script, tmp_path):
    """Its processes would train too, each with processes of its own."""
    path = script("tools=[add]", "train()\n")
    run = jobs.start([], script=path, cwd=tmp_path)
    assert run.returncode != 0
    assert f"{path}: makes a trainer when it is imported" in run.stderr
    assert 'put that below `if __name__ == "__main__":`' in run.stderr
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_names(tmp_path, monkeypatch):
    (tmp_path / "own_tools.py").write_text("def search(text: str) -> str:\n    return text\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "own_tools", raising=False)
    import own_tools

    names = importable_names([own_tools.search, calculator, "python"], "tools")
    assert names == ["own_tools:search", "mindrlhf.environments.ready.calculator:calculator", "python"]
    assert importable_names(None, "tools") == []
