"""Adapter of OpenEnv's clients, as an environment whose turns are steps."""

from abc import ABC, abstractmethod
from typing import Any


class OpenEnvironment(ABC):
    """Environment on an OpenEnv server; its reward is the sum of the steps' rewards.

    A user's subclass defines how to connect, the action for a turn's text, and the text of an observation.
    """

    @abstractmethod
    def connect(self) -> Any:
        """Open a client, for example `EchoEnv(base_url=...).sync()`."""

    @abstractmethod
    def action(self, text: str) -> Any:
        """Make the client's action from a turn's text."""

    def show(self, observation: Any) -> str:
        """Format an observation for the model."""
        return str(observation)

    def reset(self, **row: str) -> str:
        self.client = self.connect()
        self.total = 0.0
        return self.show(self.client.reset().observation)

    def reply(self, text: str) -> str | None:
        """Take a step; None when the server says that it was the last."""
        result = self.client.step(self.action(text))
        self.total += float(result.reward or 0.0)
        return None if result.done else self.show(result.observation)

    def get_reward(self) -> float:
        return self.total
