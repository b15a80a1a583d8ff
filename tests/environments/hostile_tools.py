"""Environment and tools that do everything that they should not; run in processes of a pool only."""

import asyncio
import ctypes
import os
import random
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time

SLEEP = ("sleep", "98765")


class Counter:
    """Counts; loses its count with its process."""

    def reset(self, start: str = "0", **row) -> str:
        self.count = int(start)
        return f"starts at {self.count} {sorted(row)}"

    def add(self, number: int, times: int = 1) -> int:
        """Add a number.

        Args:
            number: What to add.
            times: How often.
        """
        self.count += number * times
        return self.count

    def fault(self, kind: str) -> str:
        """Do something wrong."""
        return fault(kind)

    def get_reward(self) -> float:
        return float("nan") if self.count == 13 else self.count / 2


class Turns(Counter):
    """Counts, and gives rewards of turns: the calls of each, or something wrong."""

    def get_turn_rewards(self, calls: list[int]) -> list[float]:
        if self.count == 7:
            raise ValueError("seven")
        wrong = {1: [0.5] * (len(calls) + 1), 2: [], 3: None, 4: [float("inf")] * len(calls), 5: "x" * len(calls)}
        return wrong.get(self.count, [number / 4 for number in calls])


class Moves:
    """A game that gives nothing but rewards of turns."""

    def reset(self):
        self.heard = []

    def reply(self, text: str):
        self.heard.append(text)
        return None if text == "bye" else "go on"

    async def get_turn_rewards(self):
        return [len(text) for text in self.heard]


class Echo:
    """Answers turns, and draws random numbers."""

    def reset(self, question: str):
        self.question = question

    def reply(self, text: str):
        if text == "draw":
            return str(random.random())
        return None if text == "bye" else f"{self.question}: {text}" if text else 5


async def nap(seconds: float) -> str:
    """Sleep."""
    await asyncio.sleep(seconds)
    return f"slept {seconds:g}"


def draw() -> float:
    """Draw a random number."""
    return random.random()


def process() -> int:
    """Say the process's number."""
    return os.getpid()


def fault(kind: str) -> str:
    """Do something wrong."""
    match kind:
        case "hang":
            time.sleep(1000)
        case "spin":
            while True:
                pass
        case "deaf":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            subprocess.run(["sleep", "1000"])
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "raise":
            raise ValueError("wrong " + "x" * 1_000_000)
        case "exit":
            sys.exit(3)
        case "os exit":
            os._exit(3)
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "kill the parent":
            os.kill(os.getppid(), signal.SIGKILL)
        case "segfault":
            ctypes.string_at(0)
        case "memory":
            return len(bytearray(1 << 32))
        case "gigabyte":
            return "x" * (1 << 30)
        case "long":
            return "a" + "x" * 10_000_000 + "z"
        case "print":
            print("x" * 10_000_000)
            os.write(1, b"z" * 10_000_000)
        case "scribble":
            for descriptor in range(3, 50):
                try:
                    os.write(descriptor, b"[0,[]]\n")
                except OSError:
                    continue
        case "forge":
            for descriptor in range(3, 50):
                try:
                    if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                        continue
                except OSError:
                    continue
                os.write(descriptor, b"[0,1.5,0.0,null]\n")
                time.sleep(1000)
        case "close":
            os.closerange(3, 100)
        case "fork":
            if os.fork():
                os.wait()
        case "fork and raise":
            if not os.fork():
                raise ValueError("in the child")
            os.wait()
        case "fork and stay":
            if not os.fork():
                time.sleep(1000)
        case "join the group":
            os.setpgid(0, os.getpgid(os.getppid()))
            time.sleep(1000)
        case "stop the parent":
            os.kill(os.getppid(), signal.SIGSTOP)
        case "stop the parent and hang":
            os.kill(os.getppid(), signal.SIGSTOP)
            time.sleep(1000)
        case "leave":
            subprocess.Popen(SLEEP, start_new_session=True)
        case "leave and hang":
            subprocess.Popen(SLEEP, start_new_session=True)
            time.sleep(1000)
        case "leave and die":
            subprocess.Popen(SLEEP, start_new_session=True)
            os.kill(os.getpid(), signal.SIGKILL)
        case "leave twice":
            subprocess.run(["setsid", "sh", "-c", f"setsid {' '.join(SLEEP)} &"], env={"PATH": os.environ["PATH"]})
        case "write":
            with tempfile.NamedTemporaryFile("w", delete=False) as file:
                file.write("x")
            return file.name
        case "thread":
            threading.Thread(target=time.sleep, args=(1000,)).start()
        case "object":
            return object()
        case "bytes":
            return b"bytes"
        case "none":
            return None
        case "surrogate":
            return "half \ud800"
        case "recurse":
            return fault(kind)
    return kind
