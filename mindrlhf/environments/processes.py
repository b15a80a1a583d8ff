"""Processes of conversations, and the server that forks them, as their owner sees them."""

import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mindrlhf.workers.descendants import kill
from mindrlhf.workers.peer import Peer
from mindrlhf.workers.process import WorkerProcess

BEGIN_S = 10.0  # until a conversation's process answers; then the server counts as stopped


@dataclass(frozen=True)
class CallResult:
    """Result of one call.

    value: text, a reward, a list of a reward and the turns' rewards, or None; texts and images as the process sends
    them, or `shown.received` has taken them. seconds: wall time inside of the call. failure: reason, or None.
    """

    value: Any = None
    seconds: float = 0.0
    failure: str | None = None


class ConversationPeer(Peer):
    """Process of one conversation at a time.

    process: its number, once it has begun.
    """

    def __init__(self, channel: socket.socket, number: int, timeout_s: float):
        super().__init__(channel.fileno(), channel.fileno(), timeout_s, BEGIN_S)
        self._channel = channel
        self.number = number
        self.process: int | None = None

    def assign(self, calls: Sequence[Any], requests: Iterable[Sequence[Any]]) -> None:
        """Hand out a request for each call; their time begins with the process."""
        super().assign(calls, requests)
        if self.process is None:
            self.wait_on()

    def wait_on(self) -> None:
        """Wait for the process to begin."""
        self._deadline = time.monotonic() + BEGIN_S

    def kill(self) -> None:
        """Kill the process, if it has begun, without the server."""
        if self.process is not None:
            kill(self.process)

    def close(self) -> None:
        self._channel.close()
        self.exited = True

    def _receive(self, message: Any) -> list[tuple[Any, Any]]:
        if self.process is None and isinstance(message, int):
            self.process = message
            return []
        return super()._receive(message)

    def _reply(self, values: list[Any]) -> CallResult:
        match values:
            case [str() | float() | dict() | None as value, float(seconds), str() | None as failure]:
                return CallResult(value, seconds, failure)
            case [list(rewards), float(seconds), None] if {*map(type, rewards)} == {float}:
                return CallResult(rewards, seconds)
        raise ValueError


class EnvironmentServer(WorkerProcess):
    """Process that forks the processes of conversations."""

    def __init__(self, setup: Mapping[str, Any], environment: Mapping[str, str]):
        self.greeting: dict[str, tuple[bool, list[dict[str, Any]]]] = {}
        super().__init__("mindrlhf.environments.worker", setup, setup["timeout_s"], environment, [setup["control"]])

    def _greet(self, greeting: Any) -> None:
        self.greeting = greeting

    def _reply(self, values: list[Any]) -> Any:
        raise ValueError
