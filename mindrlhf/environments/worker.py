"""Main program of the process that runs environments and tools.

It imports the user's modules once, and forks a child for each conversation, so that a conversation which hangs, takes
too much memory or ends its process does not affect the others. First comes one line of JSON with the settings, answered
by {"greeting": {environment: [raw, schemas]}} or {"error": sentence}. Then numbers come on the socket `control`: a
number with a descriptor begins a child, which serves this descriptor; without one, it ends that child. The owner's last
message is null: an end without it means that the owner was killed, and its temporary files are removed here. A child's
requests are [number, method of `_Conversation`, environment, seed, value, ...], its replies [number, value or null,
seconds, failure or null].
"""

import asyncio
import gc
import inspect
import json
import math
import os
import random
import resource
import shutil
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any

import pydantic

from mindrlhf.environments.protocol import NONE, Environment, build, load, load_tools
from mindrlhf.files.printable import shortened
from mindrlhf.units import MIB
from mindrlhf.workers.serving import greet, open_pipes, reason, serve

PACKET_BYTES = 1 << 12


def main() -> None:
    """Begin and end conversations until the control socket closes."""
    requests, replies = open_pipes()
    setup = json.loads(requests.readline())
    control = socket.socket(fileno=setup["control"])
    environments = greet(replies, lambda: _prepare(setup["environments"], setup["tools"]))
    gc.freeze()  # children share these pages
    children: dict[int, int] = {}
    while True:
        text, descriptors, *_ = socket.recv_fds(control, PACKET_BYTES, 1)
        number = json.loads(text or "null")
        if number is None:
            break
        if not descriptors:
            _end(children.pop(number, None))
            continue
        try:
            child = os.fork()
        except OSError:  # no more processes: the other side finds its descriptor closed
            os.close(descriptors[0])
            continue
        if child == 0:
            control.close()
            for pipe in (requests, replies):  # descriptors that a further fork closes
                os.dup2(descriptors[0], pipe.fileno(), inheritable=False)
            os.close(descriptors[0])
            try:
                conversation = _Conversation(environments, setup)
                serve(requests, replies, setup["timeout_s"], conversation.answer)
            finally:
                os._exit(0)
        os.close(descriptors[0])
        with suppress(PermissionError):  # it has ended
            os.setpgid(child, child)
        children[number] = child
    for child in children.values():
        _end(child)
    if not text:
        shutil.rmtree(setup["files"], ignore_errors=True)


def _end(child: int | None) -> None:
    """End a child and its children, unless it is None.

    No other process can have its id, because nobody has waited for it before.
    """
    if child is not None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)


def _prepare(environments: Mapping[str, str], tools: Sequence[str]) -> tuple[dict[str, Environment], dict[str, Any]]:
    """Import environments (name -> file.py:Class, or "" for none) and tools."""
    functions = load_tools(tools)
    built = {
        name: build(load("environment", place) if place else None, functions) for name, place in environments.items()
    }
    return built, {name: [environment.raw, environment.schemas] for name, environment in built.items()}


class _Conversation:
    """Conversation's instance of an environment; answers requests, each in one of its public methods."""

    def __init__(self, environments: Mapping[str, Environment], limits: Mapping[str, Any]):
        os.setpgid(0, 0)
        with open("/proc/self/statm") as file:
            now = int(file.read().split()[0]) * resource.getpagesize()
        _limit(resource.RLIMIT_AS, now + limits["memory_mb"] * MIB)
        _limit(resource.RLIMIT_CORE, 0)
        self._environments, self._most = environments, limits["max_output"]
        self._instance = self._seed = None

    def answer(self, action: str, name: str, seed: str, *values: Any) -> list[Any]:
        """Call the method of that name: [value or null, seconds, failure or null]."""
        start = time.perf_counter()
        value = failure = None
        try:
            if seed != self._seed:
                self._seed = seed
                random.seed(seed)
                if "numpy" in sys.modules:
                    sys.modules["numpy"].random.seed(random.getrandbits(32))
            value = getattr(self, action)(self._environments[name], *values)
        except pydantic.ValidationError as error:
            faults = error.errors(include_url=False, include_context=False, include_input=False)
            failure = "; ".join(f"argument {'.'.join(map(str, fault['loc']))}: {fault['msg']}" for fault in faults)
        except BaseException as error:  # even sys.exit loses only its call
            failure = reason(error, __file__)
        return [value, time.perf_counter() - start, failure]

    def reset(self, environment: Environment, row: dict[str, str]) -> str | None:
        """Make the instance, and begin it with the row's fields that it takes."""
        self._instance = environment.made()
        if not hasattr(self._instance, "reset"):
            return None
        taken = inspect.signature(self._instance.reset).parameters
        every = any(argument.kind is argument.VAR_KEYWORD for argument in taken.values())
        row = {name: value for name, value in row.items() if every or name in taken}
        return self._text(self._instance.reset(**row), "reset")

    def call(self, environment: Environment, tool: str, arguments: dict[str, Any]) -> str:
        """Call a tool; its result is text, or JSON."""
        if tool in environment.methods:
            result = self._finished(environment.methods[tool](self._instance, **arguments))
        elif tool in environment.functions:
            result = self._finished(environment.functions[tool](**arguments))
        else:
            known = ", ".join((*environment.methods, *environment.functions)) or NONE
            raise LookupError(f"there is no tool {tool!r}; there is {known}")
        if not isinstance(result, str | int | float | bool | list | dict | None):
            raise TypeError(f"it returned {type(result).__name__}, and not text")
        return self._text(result if isinstance(result, str) else json.dumps(result, ensure_ascii=False), tool)

    def reply(self, environment: Environment, text: str) -> str | None:
        """Answer a turn; None ends the conversation."""
        return self._text(self._instance.reply(text), "reply")

    def reward(self, environment: Environment, calls: Sequence[int]) -> float | list[float] | None:
        """Ask for the reward; None without one.

        calls: number of each turn's calls. Rewards of turns, if any, follow it in a list.
        """
        numbers = [self._finished(self._instance.get_reward())] if hasattr(self._instance, "get_reward") else []
        of_turns = getattr(self._instance, "get_turn_rewards", None)
        if of_turns:
            given = (list(calls),) if inspect.signature(of_turns).parameters else ()
            numbers = [*(numbers or [0.0]), *self._finished(of_turns(*given))]
        numbers = [float(number) for number in numbers]
        for number in numbers:
            if not math.isfinite(number):
                raise ValueError(f"a reward is {number}, and not a finite number")
        return numbers if of_turns else numbers[0] if numbers else None

    @cached_property
    def _loop(self) -> asyncio.AbstractEventLoop:
        """Event loop of all coroutines of the conversation, which may share connections."""
        return asyncio.new_event_loop()

    def _finished(self, result: Any) -> Any:
        return self._loop.run_until_complete(result) if inspect.iscoroutine(result) else result

    def _text(self, result: Any, what: str) -> str | None:
        text = self._finished(result)
        if not isinstance(text, str | None):
            raise TypeError(f"{what} returned {type(text).__name__}, and not text")
        return text and shortened(text, self._most).encode("utf-8", "replace").decode()


def _limit(which: int, value: int) -> None:
    most = resource.getrlimit(which)[1]
    value = value if most == resource.RLIM_INFINITY else min(value, most)
    resource.setrlimit(which, (value, value))
