"""Isolation of reward functions: a failure loses its sample, not the run.

A function that raises, returns no finite number, never returns or ends its process loses that one call, which is
counted; a process that hangs or dies is replaced. Memory, and access to files and the network, are not limited.
"""

import json
import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import replace
from itertools import chain, compress, count
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
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
ARRIVAL_S = 0.1  # between looks at further samples to score in the background
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
        self._broken: str | None = None  # why no further process can be started, after a change of the function's file
        self._begun: SimpleQueue[tuple[_Batch, Future[RewardTable]] | None] = SimpleQueue()
        self._background: Thread | None = None
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
        """True if all functions run in other processes.

        None is the calling program's or a model.
        """
        return not self._own and self.models is None

    def score(self, samples: Sequence[Sample], steps_done: int = 0) -> RewardTable:
        """Score samples in their order, after those of `begin`.

        steps_done: of the training.
        """
        if self._background:
            return self.begin(samples, steps_done).result()
        batch = self._open(samples, steps_done)
        self._broken = None
        try:
            while batch.open:
                self._work([batch])
        except BaseException:  # an interrupt: calls under way belong to no batch any more
            self._drop(process for process in self._processes if not process.idle)
            raise
        return self._table(batch)

    def begin(self, samples: Sequence[Sample], steps_done: int = 0) -> "Future[RewardTable]":
        """Begin to score samples in the background, as `score` does.

        Processes that have nothing left to do for earlier samples begin with them. All functions must be `apart`.
        """
        batch = self._open(samples, steps_done)
        if self._background is None:
            # Processes are told when the thread that started them ends, so that it lasts as long as the runner.
            self._background = Thread(target=self._serve, name="rewards", daemon=True)
            self._background.start()
        future: Future[RewardTable] = Future()
        self._begun.put((batch, future))
        return future

    def _open(self, samples: Sequence[Sample], steps_done: int) -> "_Batch":
        """Make a batch of all functions' calls."""
        if self._closed:
            raise RuntimeError(_CLOSED)
        return _Batch(self._calls(len(samples)), samples, Steps(steps_done, self._total_steps))

    def _table(self, batch: "_Batch") -> RewardTable:
        """Make the table of a batch whose calls are answered.

        Functions in this process are called here.
        """
        samples = batch.samples
        by_place = score_in_process(self._own, samples, batch.steps)
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

    def _serve(self) -> None:
        """Work on the batches that `begin` gives; their tables come in order."""
        batches: deque[tuple[_Batch, Future[RewardTable]]] = deque()
        while True:
            with suppress(Empty):
                while True:
                    begun = self._begun.get(block=not batches)
                    if begun is None:
                        for _, future in batches:
                            future.cancel()
                        return
                    if not batches:
                        self._broken = None
                    batches.append(begun)
            try:
                if waiting := [batch for batch, _ in batches if batch.open]:
                    self._work(waiting, ARRIVAL_S)
                while batches and not batches[0][0].open:
                    batch, future = batches[0]
                    future.set_result(self._table(batch))  # if it fails, the batch is still among those that are told
                    batches.popleft()
            except BaseException as error:  # for whoever waits
                self._drop(process for process in self._processes if not process.idle)
                for _, future in batches:
                    future.set_exception(error)
                batches.clear()

    def close(self) -> None:
        """End all processes, without zombies. May be called again."""
        self._closed = True
        if self._background:
            self._begun.put(None)
            for process in list(self._processes):
                process.kill()  # wakes the thread, which has the pipes
            self._background.join()
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

    def _work(self, batches: Sequence["_Batch"], most_s: float = math.inf) -> None:
        """Give calls to processes, earlier batches' first, and take the next replies.

        batches: with calls that have no reply. most_s: seconds to wait for a reply.
        """
        if self._closed:
            raise RuntimeError(_CLOSED)
        self._drop(one for one in self._processes if one.idle and not one.alive())  # ended since its last reply
        if self._broken is None:
            self._start()
        elif not self._processes:
            for batch in batches:
                batch.give_up(f"its process could not be replaced: {self._broken}")
            return
        for process in self._processes:
            waiting = [batch for batch in batches if batch.waiting]
            if process.idle and waiting:
                batch = process.batch = waiting[0]
                process.give(batch.take(self._settings.workers), batch.samples, batch.steps)
        if not self._processes:
            return
        wait(self._processes, most_s)
        for process in list(self._processes):
            for call, replies in process.collect():
                process.batch.answer(call, replies)
            if loss := process.loss():
                if process.calls and process.repeated:
                    process.batch.put_back(process.calls)
                elif process.calls:
                    process.batch.lose(process.calls, Reply(**loss._asdict()))
                elif not process.ready:
                    self._broken = self._broken or loss.error
                self._drop([process])
        if self._broken is None:
            self._start()  # replacements load while the caller continues


class _Batch:
    """Calls on samples: waiting calls, and the replies to others."""

    def __init__(self, calls: Iterable[Call], samples: Sequence[Sample], steps: Steps):
        self.samples = samples
        self.steps = steps
        self._waiting = deque(calls)
        self._count = len(self._waiting)
        self._answered: set[int] = set()  # functions
        self._losses: Counter[int] = Counter()  # by function: calls that hung or ended their process
        self.replies: dict[Call, list[Reply]] = {}

    @property
    def open(self) -> bool:
        return len(self.replies) < self._count

    @property
    def waiting(self) -> bool:
        return bool(self._waiting)

    def take(self, workers: int) -> list[Call]:
        """Take half of one of `workers` equal parts, so that all processes end together.

        A single process gets all.
        """
        parts = 2 * workers if workers > 1 else 1
        return [self._waiting.popleft() for _ in range(math.ceil(len(self._waiting) / parts))]

    def of(self, function: int) -> list[Reply]:
        """Return a function's replies in the order of samples."""
        calls = sorted(
            (call for call in self.replies if call.function == function), key=lambda call: call.samples.start
        )
        return [reply for call in calls for reply in self.replies[call]]

    def answer(self, call: Call, replies: list[Reply]) -> None:
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
