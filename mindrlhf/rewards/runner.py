"""Isolation of reward functions: a failure loses its sample, not the run.

A function that raises, returns no finite number, never returns or ends its process loses that one call, which is
counted; a process that hangs or dies is replaced. Memory, and access to files and the network, are not limited.
"""

import json
import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from itertools import chain, compress, count
from pathlib import Path
from typing import Any

from mindrlhf.configs.grpo import RewardSettings
from mindrlhf.configs.reward_models import MODEL_REWARDS
from mindrlhf.errors import UserError
from mindrlhf.rewards import verl
from mindrlhf.rewards.batches import Sample, Steps
from mindrlhf.rewards.in_process import score_in_process
from mindrlhf.rewards.process import Call, Reply, RewardProcess
from mindrlhf.rewards.registry import bind
from mindrlhf.rewards.table import RewardFailure, RewardTable, build_table
from mindrlhf.types import Prompt
from mindrlhf.user_functions import absolute, load_function
from mindrlhf.workers.peer import wait

# A function that has lost this many calls of a batch by hanging or crashing, and answered none, is not tried on the
# rest: a function that always hangs then costs a step seconds, not hours.
HOPELESS_AFTER = 3
_CLOSED = "this RewardRunner is closed"

# Imported on use: other functions need no models.
MODEL_FUNCTIONS = "mindrlhf.judging.functions:ModelFunctions"


class RewardRunner(AbstractContextManager):
    """Pool of reward processes for one set of functions, called by one thread.

    names: names of the functions in tables and metrics, in the settings' order: the shipped name, or the name after the
    colon, with `_2`, `_3`, ... for repeated ones. comparing: names of the functions that need a ground truth. models:
    functions that are models, in this process; None without any.
    """

    def __init__(
        self,
        settings: RewardSettings,
        functions: Mapping[str, Callable[..., Any]] | None = None,
        total_steps: int = 0,
    ):
        """Start the processes and import the functions; raises UserError if that fails.

        functions: of the calling program, by the names that settings have for them; they run in this process.
        total_steps: of the training, for functions that ask for them.
        """
        self._settings = settings
        every = settings.all_functions
        self._total_steps = total_steps
        self.names = _labels(function.name for function in every)
        self._own = {
            place: bind(functions[one.name], self.names[place], one.args)
            for place, one in enumerate(every)
            if functions and one.name in functions
        }
        scored = {place: one for place, one in enumerate(every) if one.name in MODEL_REWARDS}
        self.models: Any = None
        apart = self._own.keys() | scored.keys()
        self._places = [place for place in range(len(every)) if place not in apart]  # of the processes' functions
        self._functions = [(absolute(every[place].name), every[place].args) for place in self._places]
        for name, args in self._functions:
            try:
                json.dumps(args)
            except (TypeError, ValueError) as error:
                right = "args must be numbers, text, lists and maps of these"
                raise UserError(f"reward {name!r}: {right} ({error}).") from None
        self._reported: set[str] = set()
        self._background: ThreadPoolExecutor | None = None
        self._closed = False
        self._processes: list[RewardProcess] = []
        try:
            if scored:
                self.models = load_function("reward", MODEL_FUNCTIONS)(scored)
            self._start()
            self._wait_until_ready()
        except BaseException:
            self.close()
            raise
        needing = {place for place, function in self._own.items() if function.needs_ground_truth}
        needing |= self.models.needing if self.models else set()
        if self._functions:
            needing.update(compress(self._places, self._processes[0].needs_ground_truth))
        self.comparing = tuple(name for place, name in enumerate(self.names) if place in needing)
        self._takes_batch = self._processes[0].takes_batch if self._functions else []

    def check_ground_truths(self, prompts: Iterable[Prompt], data: str | Path) -> None:
        """Refuse prompts, from `data`, that lack a ground truth some function needs."""
        lacking = next((prompt.id for prompt in prompts if "ground_truth" not in prompt.fields), None)
        if self.comparing and lacking is not None:
            raise UserError(
                f"{data}: row {lacking} has no ground truth, and the reward function {self.comparing[0]!r} compares "
                "with one; convert a source that has it, or name functions that need none."
            )
        if any(function.name == "verl" for function in self._settings.all_functions):
            verl.check_sources([prompt.fields for prompt in prompts], data)

    @property
    def apart(self) -> bool:
        """True if all functions run in other processes, and none is the calling program's or a model."""
        return not self._own and self.models is None

    def score(self, samples: Sequence[Sample], steps_done: int = 0) -> RewardTable:
        """Score samples in their order, after those of `begin`.

        steps_done: of the training.
        """
        return self.begin(samples, steps_done).result() if self._background else self._score(samples, steps_done)

    def begin(self, samples: Sequence[Sample], steps_done: int = 0) -> "Future[RewardTable]":
        """Begin to score samples in the background, as `score` does.

        All functions must be `apart`.
        """
        if self._background is None:
            self._background = ThreadPoolExecutor(1, "rewards")
        return self._background.submit(self._score, samples, steps_done)

    def _score(self, samples: Sequence[Sample], steps_done: int) -> RewardTable:
        if self._closed:
            raise RuntimeError(_CLOSED)
        steps = Steps(steps_done, self._total_steps)
        self._drop(process for process in self._processes if not process.alive())  # ended since the last batch
        batch = _Batch(self._calls(len(samples)))
        try:
            self._run(batch, samples, steps)
        except BaseException:  # an interrupt: calls under way belong to no batch any more
            self._drop(process for process in self._processes if not process.idle)
            raise
        by_place = score_in_process(self._own, samples, steps)
        operations = 0.0
        if self.models:
            before = self.models.operations
            by_place |= self.models(samples)
            operations = self.models.operations - before
        by_place |= {place: batch.of(function) for function, place in enumerate(self._places)}
        replies = {name: by_place[place] for place, name in enumerate(self.names)}
        weights = [function.weight for function in self._settings.all_functions]
        table = build_table(weights, replies, scoring=len(self._settings.functions))
        new = {name: min(errors) for name, errors in table.errors.items() if errors and name not in self._reported}
        self._reported.update(new)
        failures = []
        for name, at in new.items():
            one = samples[at]
            failures.append(RewardFailure(name, at, table.errors[name][at], one.prompt, one.completion, one.fields))
        return replace(table, first_failures=tuple(failures), operations=operations)

    def close(self) -> None:
        """End all processes, without zombies. May be called again."""
        self._closed = True
        if self._background:
            for process in list(self._processes):
                process.kill()  # wakes the thread, which has the pipes
            self._background.shutdown(cancel_futures=True)
        self._drop(self._processes)
        if self.models:
            self.models.close()

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _calls(self, samples: int) -> Iterator[Call]:
        """Yield the calls of all functions: each sample's, or one for a batch."""
        for function, whole in enumerate(self._takes_batch):
            size = samples if whole else 1
            yield from (Call(function, range(start, start + size)) for start in range(0, samples, size or 1))

    def _wait_until_ready(self) -> None:
        while starting := [process for process in self._processes if not process.ready]:
            wait(starting)
            for process in starting:
                process.collect()
                if loss := process.loss():
                    names = ", ".join(self.names[place] for place in self._places)
                    raise UserError(process.refusal or f"reward functions {names} do not load: {loss.error}.")

    def _start(self) -> None:
        while self._functions and not self._closed and len(self._processes) < self._settings.workers:
            self._processes.append(RewardProcess(self._functions, self._settings.timeout_s))

    def _drop(self, processes: Iterable[RewardProcess]) -> None:
        for process in list(processes):
            process.stop()
            self._processes.remove(process)

    def _run(self, batch: "_Batch", samples: Sequence[Sample], steps: Steps) -> None:
        broken = None  # why no further process can be started, for example after a change of the function's file
        while batch.open:
            if self._closed:
                raise RuntimeError(_CLOSED)
            if broken is None:
                self._start()
            elif not self._processes:
                batch.give_up(f"its process could not be replaced: {broken}")
                return
            for process in self._processes:
                if process.idle and (calls := batch.take(self._settings.workers)):
                    process.give(calls, samples, steps)
            if not batch.open:
                break
            wait(self._processes)
            for process in list(self._processes):
                batch.answer(process.collect())
                if loss := process.loss():
                    if process.repeated:
                        batch.put_back(process.calls)
                    elif process.calls:
                        batch.lose(process.calls, Reply(**loss._asdict()))
                    elif not process.ready:
                        broken = broken or loss.error
                    self._drop([process])
        if broken is None:
            self._start()  # replacements load while the caller continues


class _Batch:
    """Calls of one `score`: waiting calls, and the replies to others."""

    def __init__(self, calls: Iterable[Call]):
        self._waiting = deque(calls)
        self._count = len(self._waiting)
        self._answered: set[int] = set()  # functions
        self._losses: Counter[int] = Counter()  # by function: calls that hung or ended their process
        self.replies: dict[Call, list[Reply]] = {}

    @property
    def open(self) -> bool:
        return len(self.replies) < self._count

    def take(self, workers: int) -> list[Call]:
        """Take half of one of `workers` equal parts, so that all processes end together."""
        return [self._waiting.popleft() for _ in range(math.ceil(len(self._waiting) / (2 * workers)))]

    def of(self, function: int) -> list[Reply]:
        """Return a function's replies in the order of samples."""
        calls = sorted(
            (call for call in self.replies if call.function == function), key=lambda call: call.samples.start
        )
        return [reply for call in calls for reply in self.replies[call]]

    def answer(self, answered: Iterable[tuple[Call, list[Reply]]]) -> None:
        for call, replies in answered:
            self.replies[call] = replies
            self._answered.add(call.function)

    def put_back(self, calls: Iterable[Call]) -> None:
        """Queue calls again that a process did not begin."""
        self._waiting.extendleft(reversed(list(calls)))

    def lose(self, calls: Iterable[Call], reply: Reply) -> None:
        """Store `reply` for all samples of the first call; queue the others again."""
        call, *others = calls
        self.replies[call] = [reply] * len(call.samples)
        self.put_back(others)
        self._losses[call.function] += 1
        losses = self._losses[call.function]
        if losses >= HOPELESS_AFTER and call.function not in self._answered:
            self.give_up(f"not tried: each of {losses} calls before it hung or ended its process", call.function)

    def give_up(self, reason: str, function: int | None = None) -> None:
        """Fail the waiting calls of a function, or all."""
        lost = [call for call in self._waiting if function in (None, call.function)]
        self.replies |= {call: [Reply(error=reason)] * len(call.samples) for call in lost}
        self._waiting = deque(call for call in self._waiting if call not in self.replies)


def open_rewards(
    stack: ExitStack,
    settings: RewardSettings,
    prompts: Iterable[Prompt],
    data: str | Path,
    functions: Mapping[str, Callable[..., Any]] | None = None,
    total_steps: int = 0,
) -> RewardRunner:
    """Start a runner, which `stack` closes.

    Raises UserError if its functions do not suit the prompts from `data`. functions, total_steps: see `RewardRunner`.
    """
    runner = stack.enter_context(RewardRunner(settings, functions, total_steps))
    runner.check_ground_truths(prompts, data)
    return runner


def _labels(names: Iterable[str]) -> tuple[str, ...]:
    labels: list[str] = []
    for name in names:
        label = name.rpartition(":")[2]
        choices = chain([label], (f"{label}_{number}" for number in count(2)))
        labels.append(next(choice for choice in choices if choice not in labels))
    return tuple(labels)
