"""Command that a launcher starts as ranks, and further starts after a failure."""

import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from mindrlhf.errors import UserError
from mindrlhf.run.stop_signals import HANGUP, SIGNALS

TRAINING = ("train", "sft")  # commands of `mindrlhf` that several ranks run together
PYTHON = ("python", "python3")
RESUME = ("--resume_training", "auto")
RESUMES = ("resume_training", "resume_mode")  # in the name of a flag or setting that says where to begin
USERS_MISTAKE = 2  # exit code of a rank


@dataclass(frozen=True)
class RankJob:
    """Job of several ranks.

    words: the ranks' program, after `python`. workers: ranks on all nodes. per_node: on each node. retries: further
    starts after a failure. logs: folder of logs.
    """

    words: Sequence[str]
    workers: int
    per_node: int
    retries: int
    logs: Path

    @property
    def nodes(self) -> int:
        return self.workers // self.per_node

    def logs_of(self, attempt: int) -> Path:
        """Name the folder with the logs of one start, counted from 0."""
        return self.logs / f"start_{attempt + 1}"


@dataclass(frozen=True)
class Ending:
    """End of a start of a job.

    code: exit code of the first rank that failed, or 0. words: what happened. final: no further start.
    """

    code: int
    words: str
    final: bool = False


@dataclass
class StopRequests:
    """Signals that ask the launcher to stop; `count` of them have come."""

    count: int = field(default=0)

    def note(self, number: int, frame: FrameType | None) -> None:
        self.count += 1


def python_words(command: Sequence[str], resumes: bool) -> list[str]:
    """Write a command line as words after `python`.

    The command is `train` or `sft` with its flags, with or without `mindrlhf` before it, or a script with its
    arguments. resumes: `train` and `sft` begin at the last checkpoint, unless the command names another. Raises
    UserError for any other command.
    """
    words = list(command)
    if words[:1] == ["--"]:
        words = words[1:]
    if words[:1] and words[0] in PYTHON:
        words = words[1:]
    if words[:2] == ["-m", "mindrlhf"]:
        words = words[2:]
    elif words[:1] == ["mindrlhf"]:
        words = words[1:]
    elif words[:1] and (words[0].endswith(".py") or words[0] == "-m"):
        return words
    if not words:
        raise UserError("the command of the ranks is missing; give `train` or `sft` with its flags, or a script.")
    if words[0] not in TRAINING:
        right = f"{' or '.join(TRAINING)} with its flags, or a script (NAME.py)"
        raise UserError(f"the command of the ranks begins with {words[0]!r}; give {right}.")
    told = any(name in word for word in words for name in RESUMES)
    return ["-m", "mindrlhf", *words, *(RESUME if resumes and not told else ())]


def pair_of(flag: str, text: str, separator: str, form: str) -> tuple[str, str]:
    """Split the value of a flag into both of its parts. Raises UserError."""
    before, found, after = text.partition(separator)
    if not before or not found or not after:
        raise UserError(f"{flag} {text}: give {form}.")
    return before, after


def start_until_it_ends(start: Callable[[int], Ending], retries: int) -> int:
    """Start a job, and again after a failure; returns the exit code.

    start: called with the number of the start, from 0.
    """
    for attempt in range(retries + 1):
        ended = start(attempt)
        if ended.code == 0 or ended.final:
            break
        if attempt < retries:
            again = f"starting again from the last checkpoint ({attempt + 1} of {retries})"
            print(f"mindrlhf launch: {ended.words}; {again}", file=sys.stderr, flush=True)
    if ended.code:
        print(f"mindrlhf launch: {ended.words}", file=sys.stderr, flush=True)
    return ended.code


@contextmanager
def stop_requests() -> Iterator[StopRequests]:
    """Count SIGTERM, SIGINT and SIGHUP, unless they are ignored (`nohup`), instead of ending."""
    requests = StopRequests()
    heard = [number for number in (*SIGNALS, HANGUP) if signal.getsignal(number) != signal.SIG_IGN]
    earlier = {number: signal.signal(number, requests.note) for number in heard}
    try:
        yield requests
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)
