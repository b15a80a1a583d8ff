"""Owner's side of environments and tools: their processes, with limits.

A conversation with an environment has its own process. Conversations without one have no state: their requests share
processes, one at a time. A call that raises, returns no text, hangs, takes too much memory or ends its process is
answered by a failure. An environment is lost when its process ends; its conversation then has only failures.
"""

import json
import math
import resource
import socket
import tempfile
import time
import uuid
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field, replace
from itertools import count
from types import NoneType
from typing import Any

from mindrlhf.configs.images import ImageSettings
from mindrlhf.environments.processes import BEGIN_S, CallResult, ConversationPeer, EnvironmentServer
from mindrlhf.environments.ready.code_interpreter import REQUIRED, SETTING
from mindrlhf.errors import UserError
from mindrlhf.files.trees import remove_tree
from mindrlhf.user_functions import absolute
from mindrlhf.workers.descendants import MARK
from mindrlhf.workers.peer import wait

Key = tuple[int, ...]
LOST = "its environment was lost"
MOST_BEGINS = 3  # of a conversation's process for one request
MOST_FILES = 1 << 16  # open at a time
NO_IMAGES = "the model takes text alone"


@dataclass(frozen=True)
class Outcome:
    """Answers to one request, in the order of its calls.

    key: the conversation. action: `reset`, `call`, `reply` or `reward`. lost: the environment is gone.
    """

    key: Key
    action: str
    answers: tuple[CallResult, ...]
    lost: bool = False


def tool_schemas(environment: str | None, tools: Sequence[str]) -> list[dict[str, Any]]:
    """Describe the tools of an environment, if any, and of functions, as JSON schemas.

    The user's files are imported in another process, which they may end or stop. Raises UserError.
    """
    if not environment and not tools:
        return []
    with EnvironmentPool({"": environment or ""}, tools) as pool:
        return pool.schemas[""]


class EnvironmentPool(AbstractContextManager):
    """Environments of all conversations; not thread-safe.

    A conversation has a key of integers, and at most one request under way. schemas, raw: by the environment's name,
    the tools' schemas, and whether it answers turns by `reply`. stateful: names of those that are not tools alone.
    """

    def __init__(
        self,
        environments: Mapping[str, str],
        tools: Sequence[str] = (),
        workers: int = 64,
        timeout_s: float = 10.0,
        memory_mb: int = 1024,
        max_output: int = 4096,
        sandbox: str = REQUIRED,
        images: ImageSettings | None = None,
        no_images: str = NO_IMAGES,
    ):
        """Start the process that imports environments and tools; UserError if that fails.

        environments: name -> `file.py:Class`, a ready one's name, or "" for tools alone. tools: functions that every
        environment has. workers: requests that run at the same time. timeout_s, memory_mb: limits of one call; the
        memory is in addition to an idle process. max_output: characters of an answer; a longer one loses its middle.
        sandbox: `required` or `best_effort`, what the kernel must hold of code that a model writes. images: of answers
        that show some; None, for the reason `no_images`, refuses them.
        """
        self._files = tempfile.TemporaryDirectory(prefix="mindrlhf-tools-", ignore_cleanup_errors=True)
        self._setup = {
            "environments": {name: absolute(place) for name, place in environments.items()},
            "tools": [absolute(tool) for tool in tools],
            "timeout_s": timeout_s,
            "memory_mb": memory_mb,
            "max_output": max_output,
            "files": self._files.name,
            "images": images and images.model_dump(),
            "no_images": no_images,
        }
        self._images = images
        self._environment = {"TMPDIR": self._files.name, SETTING: sandbox, MARK: uuid.uuid4().hex}
        self._workers = workers
        self._timeout_s = timeout_s
        self.stateful = {name for name, place in environments.items() if place}
        self._numbers = count()
        self._conversations: dict[Key, _Conversation] = {}
        self._waiting: deque[_Conversation] = deque()
        self._running: list[_Conversation] = []
        self._ready: list[Outcome] = []
        self._spare: list[ConversationPeer] = []  # processes without a conversation
        self._last_begin = -math.inf  # time of a process's
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)  # a conversation takes one
        with suppress(ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, MOST_FILES)), hard))
        self._start()
        self.raw = {name: raw for name, (raw, _) in self._server.greeting.items()}
        self.schemas = {name: schemas for name, (_, schemas) in self._server.greeting.items()}

    def reset(self, key: Key, name: str, row: Mapping[str, str], answered: int = 0) -> None:
        """Begin a conversation; the answer is the environment's first text, or None.

        name: of the environment. row: the data's fields. answered: requests of an earlier part of it, without a state.
        """
        self._conversations[key] = _Conversation(key, name, stateful=name in self.stateful, requests=answered)
        self._request(key, "reset", [(row,)] if name in self.stateful else [])

    def call(self, key: Key, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> None:
        """Call tools, (name, arguments) each, in their order."""
        self._request(key, "call", calls)

    def reply(self, key: Key, text: str) -> None:
        """Hand a turn to an environment without tools; the answer None ends the conversation."""
        self._request(key, "reply", [(text,)])

    def reward(self, key: Key, calls: Sequence[int] = ()) -> None:
        """Ask the environment for its reward; the answer is None if it has none.

        calls: number of each turn's calls; if the environment gives rewards for turns, the answer is a list.
        """
        self._request(key, "reward", [(calls,)] if self._conversations[key].stateful else [])

    def end(self, key: Key) -> None:
        """Forget a conversation with its requests, and end its process."""
        conversation = self._conversations.pop(key)
        for queue in (self._waiting, self._running):
            if conversation in queue:
                queue.remove(conversation)
        self._ready = [outcome for outcome in self._ready if outcome.key != key]
        self._drop(conversation.peer)

    def collect(self, wait_for_one: bool = False) -> list[Outcome]:
        """Return the outcomes of answered requests.

        wait_for_one: wait until there is one, if any request is under way.
        """
        self._fill()
        while True:
            blocks = wait_for_one and not self._ready
            by_peer = {conversation.peer: conversation for conversation in self._running}
            for peer in wait(by_peer, math.inf if blocks else 0.0) if by_peer else ():
                self._advance(by_peer[peer])
            self._fill()
            if self._ready or not (wait_for_one and self._running):
                ready, self._ready = self._ready, []
                return ready

    def close(self) -> None:
        """End all processes and remove their temporary files. May be called again."""
        for key in list(self._conversations):
            self.end(key)
        for peer in self._spare:
            self._drop(peer)
        self._stop()
        remove_tree(self._files.name)
        self._files.cleanup()

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _start(self) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._server = EnvironmentServer(self._setup | {"control": theirs.fileno()}, self._environment)
        self._control.settimeout(BEGIN_S)
        while not self._server.ready:
            wait([self._server])
            self._server.collect()
            if loss := self._server.loss():
                self.close()
                raise UserError(self._server.refusal or f"environments and tools do not load: {loss.error}.")

    def _stop(self) -> None:
        """End the server after a last message, without which it would remove the files."""
        with suppress(OSError):
            self._control.send(b"null")
        self._control.close()
        self._server.stop()

    def _request(self, key: Key, action: str, calls: Sequence[tuple[Any, ...]]) -> None:
        conversation = self._conversations[key]
        conversation.action = action
        conversation.calls = list(calls)
        conversation.answers = []
        conversation.requests += 1
        conversation.begins = 0
        self._waiting.append(conversation)
        self._fill()

    def _fill(self) -> None:
        """Begin requests while there is room for more."""
        while self._waiting and len(self._running) < self._workers:
            conversation = self._waiting.popleft()
            if conversation.calls and not conversation.lost:
                self._begin(conversation)
                self._running.append(conversation)
            else:
                self._finish(conversation)

    def _begin(self, conversation: "_Conversation") -> None:
        """Hand calls without an answer to the conversation's process, or to another one."""
        while conversation.peer is None and self._spare and not conversation.stateful:
            peer = self._spare.pop()
            peer.collect()
            if peer.exited:
                self._drop(peer)
            else:
                conversation.peer = peer
        if conversation.peer is None:
            conversation.begins += 1
            conversation.peer = self._new_peer()
        request = conversation.action, conversation.name, conversation.seed
        calls = conversation.calls[len(conversation.answers) :]
        conversation.peer.assign(calls, [(*request, *values) for values in calls])

    def _new_peer(self) -> ConversationPeer:
        if not self._server.alive():
            self._replace_server()
        ours, theirs = socket.socketpair()
        number = next(self._numbers)
        with theirs:
            if not self._told(number, theirs):
                self._replace_server()
                self._told(number, theirs)
        return ConversationPeer(ours, number, self._timeout_s)

    def _told(self, number: int, *sockets: socket.socket) -> bool:
        """Send the server a number, and its sockets; False if it has died.

        One that does not read is ended.
        """
        try:
            socket.send_fds(self._control, [json.dumps(number).encode()], [one.fileno() for one in sockets])
        except TimeoutError:
            self._server.leave()
            return False
        except OSError:
            return False
        return True

    def _replace_server(self) -> None:
        """Start another server; conversations that the former one has begun go on."""
        self._control.close()
        self._server.leave()
        self._start()

    def _advance(self, conversation: "_Conversation") -> None:
        """Take answers, and a failure for a call that gets none."""
        waited = conversation.peer.process is None
        answers = (answer for _, answer in conversation.peer.collect())
        conversation.answers += (conversation.checked(answer, self._images) for answer in answers)
        if waited and conversation.peer.process is not None:
            self._last_begin = time.monotonic()
        if not conversation.peer.idle and (loss := conversation.peer.loss()):
            begun = conversation.peer.process is not None
            if not begun and loss.timed_out and time.monotonic() < self._last_begin + BEGIN_S:
                conversation.peer.wait_on()  # the server is slow, and begins one after the other
                return
            if begun or conversation.begins == MOST_BEGINS:
                conversation.answers.append(CallResult(None, loss.seconds, loss.error))
                conversation.lost = conversation.stateful
            elif loss.timed_out:
                self._replace_server()
            if loss.timed_out:
                conversation.peer.kill()
            self._drop(conversation.peer)
            conversation.peer = None
            if len(conversation.answers) < len(conversation.calls) and not conversation.lost:
                self._begin(conversation)
        if conversation.peer is None or conversation.peer.idle:
            self._running.remove(conversation)
            self._finish(conversation)

    def _finish(self, conversation: "_Conversation") -> None:
        rest = [CallResult(failure=LOST)] * (len(conversation.calls) - len(conversation.answers))
        answers = tuple(conversation.answers + rest)
        self._ready.append(Outcome(conversation.key, conversation.action, answers, conversation.lost))
        if conversation.peer and not conversation.stateful:
            if any(answer.failure for answer in answers):  # the process may be in a bad state
                self._drop(conversation.peer)
            else:
                self._spare.append(conversation.peer)
            conversation.peer = None

    def _drop(self, peer: ConversationPeer | None) -> None:
        if peer:
            peer.close()
            self._told(peer.number)


@dataclass(eq=False)
class _Conversation:
    """Conversation with its present request: arguments of its calls, and answers so far.

    requests: number of requests until now. begins: of processes for the present request.
    """

    key: Key
    name: str
    stateful: bool
    peer: ConversationPeer | None = None
    lost: bool = False
    requests: int = 0
    begins: int = 0
    action: str = ""
    calls: list[tuple[Any, ...]] = field(default_factory=list)
    answers: list[CallResult] = field(default_factory=list)

    @property
    def seed(self) -> str:
        """Seed of random numbers: one for an environment, else one for each request."""
        return " ".join(map(str, self.key if self.stateful else (*self.key, self.requests)))

    def checked(self, answer: CallResult, images: ImageSettings | None) -> CallResult:
        """Turn a forged answer, one of the wrong kind, into a failure.

        Images that were sent become pictures.
        """
        kinds = {"call": str, "reward": (float, list, NoneType)}.get(self.action, (str, NoneType))
        if answer.failure or isinstance(answer.value, kinds):
            return answer
        if isinstance(answer.value, dict) and self.action != "reward":
            from mindrlhf.environments.shown import received  # it imports Pillow, which text does not need

            with suppress(ValueError):
                return replace(answer, value=received(answer.value, images))
        return CallResult(None, answer.seconds, "its process gave no answer of the right kind")
