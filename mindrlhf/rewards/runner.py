"""Isolation of reward functions: a failure costs its sample and not the run.

Functions run in processes of their own. A function that raises, returns no finite number, never returns, calls
`sys.exit` or crashes the interpreter loses that one call, which is counted; a process that hangs or dies is
replaced. Not limited: memory, and access to files and the network.
"""

import json
import math
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, count
from pathlib import Path
from typing import Any

from mindrlhf.configs.grpo import RewardSettings
from mindrlhf.errors import UserError
from mindrlhf.rewards.process import START_TIMEOUT_S, Call, Reply, RewardProcess, Sample, wait
from mindrlhf.rewards.table import RewardFailure, RewardTable, build_columns
from mindrlhf.types import Prompt
from mindrlhf.user_functions import absolute

# A function that has lost this many calls of a batch by hanging or crashing, and answered none, is not tried on the
# rest of it: one that always hangs then costs a step seconds, not hours.
HOPELESS_AFTER = 3


class RewardRunner:
    """Pool of reward processes for one set of functions.

    It is a context manager, for one thread at a time.

    names: of the functions in tables and metrics, in the settings' order: the shipped name, or the name
        after the colon, with `_2`, `_3`, ... for repeated ones.
    comparing: names of the functions that need a ground truth.
    """

    def __init__(self, settings: RewardSettings):
        """Start the processes, and wait until they have imported the functions.

        Raises UserError when they cannot.
        """
        self._settings = settings
        self._functions = [
            (absolute(function.name), _plain(function.name, function.args)) for function in settings.all_functions
        ]
        self._weights = [function.weight for function in settings.all_functions]
        self.names = _labels(function.name for function in settings.all_functions)
        self._reported: set[str] = set()
        self._closed = False
        self._processes: list[RewardProcess] = []
        try:
            self._start()
            while starting := [process for process in self._processes if not process.ready]:
                wait(starting)
                for process in starting:
                    process.collect()
                    if process.exited or process.overdue:
                        raise UserError(
                            f"reward functions {', '.join(self.names)} do not load: {self._lost(process).error}."
                        )
            needs = self._processes[0].needs_ground_truth
            self.comparing = tuple(name for name, needed in zip(self.names, needs, strict=True) if needed)
        except BaseException:
            self.close()
            raise

    def check_ground_truths(self, prompts: Iterable[Prompt], data: str | Path) -> None:
        """Refuse prompts that lack a ground truth some function needs.

        data: origin of the prompts, for messages.
        """
        lacking = next((prompt.id for prompt in prompts if "ground_truth" not in prompt.fields), None)
        if self.comparing and lacking is not None:
            raise UserError(
                f"{data}: row {lacking} has no ground truth, and the reward function {self.comparing[0]!r} compares "
                "with one; convert a source that has it, or name functions that need none."
            )

    def score(self, samples: Sequence[Sample]) -> RewardTable:
        """Score samples (prompt text, completion text, fields) in their order."""
        if self._closed:
            raise RuntimeError("this RewardRunner is closed")
        self._drop(process for process in self._processes if not process.alive())  # ended since the last batch
        batch = _Batch(Call(function, sample) for function in range(len(self.names)) for sample in range(len(samples)))
        try:
            self._run(batch, samples)
        except BaseException:  # an interrupt: what is under way belongs to no batch any more
            self._drop(process for process in self._processes if not process.idle)
            raise
        columns = build_columns(
            self.names, self._weights, len(samples), batch.replies, scoring=len(self._settings.functions)
        )
        return RewardTable(**columns, first_failures=self._first_failures(columns["errors"], samples))

    def close(self) -> None:
        """End all processes, without zombies. May be called again."""
        self._closed = True
        self._drop(self._processes)

    def __enter__(self) -> "RewardRunner":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _start(self) -> None:
        while len(self._processes) < self._settings.workers:
            self._processes.append(RewardProcess(self._functions, self._settings.timeout_s))

    def _drop(self, processes: Iterable[RewardProcess]) -> None:
        for process in list(processes):
            process.stop()
            self._processes.remove(process)

    def _run(self, batch: "_Batch", samples: Sequence[Sample]) -> None:
        broken = None  # why no further process can be started: the function's file was changed, say
        while batch.open:
            if broken is None:
                self._start()
            elif not self._processes:
                batch.fail_rest(f"its process could not be replaced: {broken}")
                return
            for process in self._processes:
                if process.idle and (calls := batch.take(self._settings.workers)):
                    process.assign(calls, samples)
            if not batch.open:
                break
            wait(self._processes)
            for process in list(self._processes):
                try:
                    batch.answer(process.collect())
                except UserError as error:
                    broken = str(error)
                    process.exited = True
                if process.exited or process.overdue:
                    reply = self._lost(process)
                    if process.repeated:
                        batch.put_back(process.calls)
                    elif process.calls:
                        batch.lose(process.calls, reply)
                    elif not process.ready:
                        broken = broken or reply.error
                    self._drop([process])
        if broken is None:
            self._start()  # replacements load while the caller goes on

    def _lost(self, process: RewardProcess) -> Reply:
        """Make the reply for the call of a hanging or dead process."""
        if process.exited:
            return Reply(error=process.end_reason())
        if not process.ready:
            return Reply(error=f"importing them takes longer than {START_TIMEOUT_S:g} s")
        limit = self._settings.timeout_s
        return Reply(error=f"it took longer than {limit:g} s", seconds=limit, timed_out=True)

    def _first_failures(
        self, errors: Mapping[str, Mapping[int, str]], samples: Sequence[Sample]
    ) -> tuple[RewardFailure, ...]:
        failures = []
        for name in self.names:
            if errors[name] and name not in self._reported:
                self._reported.add(name)
                sample = min(errors[name])
                failures.append(RewardFailure(name, sample, errors[name][sample], *samples[sample]))
        return tuple(failures)


class _Batch:
    """Calls of one `score`: the waiting ones, and the replies to others."""

    def __init__(self, calls: Iterable[Call]):
        self._waiting = deque(calls)
        self._count = len(self._waiting)
        self._answered: set[int] = set()  # functions
        self._losses: Counter[int] = Counter()  # by function: calls that hung or ended their process
        self.replies: dict[Call, Reply] = {}

    @property
    def open(self) -> bool:
        return len(self.replies) < self._count

    def take(self, workers: int) -> list[Call]:
        """Take the next calls for one of `workers` processes.

        It is half of an equal part of the waiting calls, so that all processes end together.
        """
        share = math.ceil(len(self._waiting) / (2 * workers))
        return [self._waiting.popleft() for _ in range(share)]

    def answer(self, answered: Iterable[tuple[Call, Reply]]) -> None:
        for call, reply in answered:
            self.replies[call] = reply
            self._answered.add(call.function)

    def put_back(self, calls: Sequence[Call]) -> None:
        """Queue calls again that a process did not begin."""
        self._waiting.extendleft(reversed(calls))

    def lose(self, calls: Iterable[Call], reply: Reply) -> None:
        """Store `reply` for the first of `calls` and queue the others again.

        Their process hung or died in the first.
        """
        call, *others = calls
        self.replies[call] = reply
        self._losses[call.function] += 1
        self.put_back(others)
        for function, losses in self._losses.items():
            if losses >= HOPELESS_AFTER and function not in self._answered:
                rest = [call for call in self._waiting if call.function == function]
                self._give_up(rest, f"not tried: each of {losses} calls before it hung or ended its process")

    def fail_rest(self, reason: str) -> None:
        """Give up all waiting calls."""
        self._give_up(list(self._waiting), reason)

    def _give_up(self, calls: Sequence[Call], reason: str) -> None:
        self.replies.update((call, Reply(error=reason)) for call in calls)
        self._waiting = deque(call for call in self._waiting if call not in self.replies)


def _labels(names: Iterable[str]) -> tuple[str, ...]:
    labels: list[str] = []
    for name in names:
        label = name.rpartition(":")[2]
        choices = chain([label], (f"{label}_{number}" for number in count(2)))
        labels.append(next(choice for choice in choices if choice not in labels))
    return tuple(labels)


def _plain(name: str, args: Mapping[str, Any]) -> Mapping[str, Any]:
    """Check that arguments can be handed to another process, and return them."""
    try:
        json.dumps(args)
    except (TypeError, ValueError) as error:
        raise UserError(f"reward {name!r}: args must be numbers, text, lists and maps of these ({error}).") from None
    return args
