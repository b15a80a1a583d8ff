"""OpenEnv's clients as environments, by one that behaves as they do."""

from mindrlhf.environments.pool import EnvironmentPool

SOURCE = """
from dataclasses import dataclass

from mindrlhf.environments.openenv import OpenEnvironment


@dataclass
class StepResult:
    observation: object
    reward: float | None = None
    done: bool = False


class Client:
    def reset(self):
        self.count = 0
        return StepResult("begin")

    def step(self, action):
        self.count += 1
        return StepResult([action, self.count], self.count / 4, self.count == 3)


class Echo(OpenEnvironment):
    def connect(self):
        return Client()

    def action(self, text):
        return text.upper()
"""


def test_an_openenv_client(tmp_path):
    (tmp_path / "echo.py").write_text(SOURCE)

    def answer():
        (outcome,) = pool.collect(wait_for_one=True)
        assert outcome.answers[0].failure is None
        return outcome.answers[0].value

    with EnvironmentPool({"": f"{tmp_path / 'echo.py'}:Echo"}) as pool:
        pool.reset((0,), "", {"question": "q"})
        assert answer() == "begin"
        for text, expected in (("a", "['A', 1]"), ("b", "['B', 2]"), ("c", None)):
            pool.reply((0,), text)
            assert answer() == expected
        pool.reward((0,))
        assert answer() == 1.5
