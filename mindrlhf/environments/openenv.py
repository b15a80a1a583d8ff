"""Adapter of OpenEnv's clients, as an environment whose turns are steps."""

from abc import ABC, abstractmethod
from typing import Any


class OpenEnvironment(ABC):
    """Environment on an OpenEnv server, with the sum of rewards.

    A user's class says how to connect, what a turn's text means, and how observations read.
    """

    @abstractmethod
    def connect(self) -> Any:
        """Open a client: `EchoEnv(base_url=...).sync()`, say."""

    @abstractmethod
    def action(self, text: str) -> Any:
        """Make the client's action of a turn's text."""

    def show(self, observation: Any) -> str:
        """Write an observation for the model."""
        return str(observation)

    def reset(self, **row: str) -> str:
        self.client, self.total = self.connect(), 0.0
        return self.show(self.client.reset().observation)

    def reply(self, text: str) -> str | None:
        """Take a step; None when the server says that it was the last."""
        result = self.client.step(self.action(text))
        self.total += float(result.reward or 0.0)
        return None if result.done else self.show(result.observation)

    def get_reward(self) -> float:
        return self.total
