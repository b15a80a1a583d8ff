"""Main program of the process that runs environments and tools.

It imports the user's modules once, and forks a child for each conversation, so that a conversation which hangs, takes
too much memory or ends its process does not affect the others. First comes one line of JSON with the settings,
answered by {"greeting": {environment: [raw, schemas]}} or {"error": sentence}. Then numbers come on the socket
`control`: a number with a descriptor begins a child, which serves this descriptor; without one, it ends that child, all
that the child has begun, and its temporary files. The owner's last message is null: an end without it means that the
owner was killed, and all temporary files are removed here. A child first sends the number of its process. Its requests
are [number, method of `_Conversation`, environment, seed, value, ...], its replies [number, value or null, seconds,
failure or null]. A value with images is that of `shown.sent`.
"""

import asyncio
import gc
import inspect
import json
import math
import os
import random
import resource
import select
import socket
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property, partial
from typing import Any

import pydantic

from mindrlhf.environments.protocol import NONE, Environment, build, load, load_tools
from mindrlhf.environments.ready.code_interpreter import code_interpreter, required_mechanisms
from mindrlhf.environments.results import OFF, image_parts, of_response, result_text
from mindrlhf.errors import UserError
from mindrlhf.files.printable import printable, shortened
from mindrlhf.files.trees import remove_tree
from mindrlhf.units import MIB
from mindrlhf.workers.descendants import LOOK_S, adopt_orphans, children, end_all_children, end_children, kill
from mindrlhf.workers.serving import EXIT_S, MAX_REASON, greet, open_pipes, reason, send, serve

PACKET_BYTES = 1 << 12
FOLDER_MODE = 0o700


def main() -> None:
    """Begin and end conversations until the control socket closes."""
    requests, replies = open_pipes()
    setup = json.loads(requests.readline())
    control = socket.socket(fileno=setup["control"])
    environments = greet(replies, lambda: _prepare(setup["environments"], setup["tools"]))
    shown = _open_images(setup["images"])
    gc.freeze()  # children share these pages
    # Each of them would copy the pages that it touches to find this out by itself.
    _limit(resource.RLIMIT_CORE, 0)
    address_space = _address_space() + setup["memory_mb"] * MIB
    own = _Children(setup["files"])
    looked = 0.0
    while True:
        asked = select.select([control], [], [], LOOK_S if own.ending else None)[0]
        if own.ending and time.monotonic() > looked + LOOK_S:
            own.look()
            looked = time.monotonic()
        if not asked:
            continue
        text, descriptors, *_ = socket.recv_fds(control, PACKET_BYTES, 1)
        number = json.loads(text or "null")
        if number is None:
            break
        if not descriptors:
            own.end(number)
            continue
        if own.begin(number) == 0:
            control.close()
            for pipe in (requests, replies):  # descriptors that a further fork closes
                os.dup2(descriptors[0], pipe.fileno(), inheritable=False)
            os.close(descriptors[0])
            try:
                conversation = _Conversation(environments, setup, address_space, own.folder(number), shown)
                send(replies, os.getpid())
                serve(requests, replies, setup["timeout_s"], conversation.answer)
            finally:
                os._exit(0)
        os.close(descriptors[0])
    own.close()
    if not text:
        remove_tree(setup["files"])


class _Children:
    """Children of this process, by their conversations' numbers."""

    def __init__(self, files: str):
        self._files = files
        self._children: dict[int, int] = {}
        self._folders: dict[int, str] = {}
        self._unused: list[str] = []  # folders of ended conversations that wrote nothing; making one takes longer
        self._earlier = set(children())  # of the user's modules
        self._dying: set[int] = set()
        self._doomed: list[str] = []  # folders of processes that may still be dying
        self._removing: set[int] = set()  # processes that remove folders

    @property
    def ending(self) -> bool:
        """True while there is something to look at."""
        return bool(self._dying or self._doomed or self._removing)

    def folder(self, number: int) -> str:
        """Return the folder of a conversation's temporary files."""
        return self._folders[number]

    def begin(self, number: int) -> int:
        """Fork a conversation's child.

        Returns the number of its process, 0 inside of it, and -1 without processes to spare.
        """
        try:
            if not self._unused:
                self._unused.append(self._made_folder(number))
            child = os.fork()
        except OSError:  # the other side finds its descriptor closed
            return -1
        self._folders[number] = self._unused.pop()
        if child:
            with suppress(OSError):  # it has ended
                os.setpgid(child, child)
            self._children[number] = child
        return child

    def end(self, number: int) -> None:
        """Kill a conversation's child, if it has one."""
        if number in self._children:
            child = self._children.pop(number)
            kill(child)
            self._dying.add(child)
            self._doomed.append(self._folders.pop(number))

    def look(self) -> None:
        """Go on ending what ended conversations have begun and written.

        It never waits.
        """
        for child in (*self._dying, *self._removing):
            with suppress(ChildProcessError):
                if os.waitpid(child, os.WNOHANG)[0] == 0:
                    continue
            self._dying.discard(child)
            self._removing.discard(child)
        if not end_children({*self._children.values(), *self._earlier, *self._removing}) and not self._dying:
            self._remove()

    def close(self) -> None:
        """End all children and what they have begun."""
        for number in list(self._children):
            self.end(number)
        end_all_children(EXIT_S)

    def _remove(self) -> None:
        """Remove the folders of ended conversations, or keep those that are as made.

        Another process does so, because there may be much in them.
        """
        full = []
        for folder in self._doomed:
            (self._unused if _is_as_made(folder) else full).append(folder)
        self._doomed = full
        with suppress(OSError):  # without processes to spare, it is tried again
            if full and (child := os.fork()) == 0:
                try:
                    for folder in full:
                        remove_tree(folder)
                finally:
                    os._exit(0)
            elif full:
                self._removing.add(child)
                self._doomed = []

    def _made_folder(self, number: int) -> str:
        folder = os.path.join(self._files, str(number))
        os.mkdir(folder, FOLDER_MODE)
        return folder


def _prepare(environments: Mapping[str, str], tools: Sequence[str]) -> tuple[dict[str, Environment], dict[str, Any]]:
    """Import environments (name -> file.py:Class, or "" for none) and tools.

    UserError also if there is a tool for code of a model, and nothing to hold the code.
    """
    functions = load_tools(tools)
    if code_interpreter in functions.values():
        required_mechanisms()
    built = {
        name: build(load("environment", place) if place else None, functions) for name, place in environments.items()
    }
    return built, {name: [environment.raw, environment.schemas] for name, environment in built.items()}


def _open_images(settings: Mapping[str, Any] | None) -> Callable[..., dict[str, list[Any]]] | None:
    """Import what reads images, for a model that takes them; children share it."""
    if settings is None:
        return None
    from mindrlhf.configs.images import ImageSettings
    from mindrlhf.environments.shown import sent

    return partial(sent, settings=ImageSettings(**settings))


class _Conversation:
    """Conversation's instance of an environment; answers requests, each in one of its public methods.

    address_space: bytes that its process may have. folder: of its temporary files. shown: writer of answers with
    images; None where none are taken.
    """

    def __init__(
        self,
        environments: Mapping[str, Environment],
        limits: Mapping[str, Any],
        address_space: int,
        folder: str,
        shown: Callable[..., dict[str, list[Any]]] | None,
    ):
        os.setpgid(0, 0)
        adopt_orphans()
        os.environ["TMPDIR"] = tempfile.tempdir = folder
        _limit(resource.RLIMIT_AS, address_space)
        self._environments = environments
        self._most = limits["max_output"]
        self._no_images = limits["no_images"]
        self._shown = shown
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
        except UserError as error:  # of an image, a sentence of ours
            failure = printable(str(error))[:MAX_REASON]
        except BaseException as error:  # even sys.exit loses only its call
            failure = reason(error, __file__)
        return [value, time.perf_counter() - start, failure]

    def reset(self, environment: Environment, row: dict[str, str]) -> str | dict[str, list[Any]] | None:
        """Make the instance, and begin it with the row's fields that it takes."""
        self._instance = environment.made()
        if not hasattr(self._instance, "reset"):
            return None
        taken = inspect.signature(self._instance.reset).parameters
        every = any(argument.kind is argument.VAR_KEYWORD for argument in taken.values())
        row = {name: value for name, value in row.items() if every or name in taken}
        return self._answer(self._finished(self._instance.reset(**row)), "reset")

    def call(self, environment: Environment, tool: str, arguments: dict[str, Any]) -> str | dict[str, list[Any]] | None:
        """Call a tool; its result is text, JSON, or shows images."""
        if tool in environment.methods:
            result = self._finished(environment.methods[tool](self._instance, **arguments))
        elif tool in environment.functions:
            result = self._finished(environment.functions[tool](**arguments))
        else:
            known = ", ".join((*environment.methods, *environment.functions)) or NONE
            raise LookupError(f"there is no tool {tool!r}; there is {known}")
        return self._answer(result, tool, result_text)

    def reply(self, environment: Environment, text: str) -> str | dict[str, list[Any]] | None:
        """Answer a turn; None ends the conversation."""
        return self._answer(self._finished(self._instance.reply(text)), "reply")

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

    def _answer(
        self, result: Any, what: str, written: Callable[[Any], Any] = lambda result: result
    ) -> str | dict[str, list[Any]] | None:
        """Write a result for the owner.

        written: function that makes a text of a result without images.
        """
        if isinstance(result, str):  # most are, and telling the others apart takes long in a new process
            return self._text(result, what)
        result = of_response(result)
        parts = image_parts(result, by_text=self._shown is not None)
        if parts is None:
            return self._text(written(result), what)
        if self._shown is None:
            raise UserError(f"{what} {OFF.format(self._no_images)}.")
        return self._shown(parts, what=what, most=self._most)

    def _text(self, text: Any, what: str) -> str | None:
        if not isinstance(text, str | None):
            raise TypeError(f"{what} returned {type(text).__name__}, and not text")
        return text and shortened(text, self._most).encode("utf-8", "replace").decode()


def _is_as_made(folder: str) -> bool:
    """Test for an empty folder with the mode that it was made with."""
    try:
        return stat.S_IMODE(os.lstat(folder).st_mode) == FOLDER_MODE and not os.listdir(folder)
    except OSError:
        return False


def _address_space() -> int:
    """Return the bytes of this process's address space."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


def _limit(which: int, value: int) -> None:
    most = resource.getrlimit(which)[1]
    value = value if most == resource.RLIM_INFINITY else min(value, most)
    resource.setrlimit(which, (value, value))
