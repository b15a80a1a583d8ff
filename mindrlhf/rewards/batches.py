"""Arguments of reward functions by name.

A function is called for one sample, or as TRL's and verl's for a batch. A batch's arguments are lists with an element
for each sample. TRL's functions take `prompts`, `completions`, `prompt_ids`, `completion_ids` and the rows' columns; a
prompt is text, or messages if the dataset has them, and its completion is one message of the assistant then. A column
has the dataset's values, None in rows without one. They may also take `trainer_state` (`TrainerState`), `log_metric`
and `log_extra` (`Logged`). verl's functions take `data_sources`, `solution_strs`, `ground_truths` and `extra_infos`.
Imports only the standard library.
"""

import inspect
import json
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from statistics import fmean
from types import MappingProxyType
from typing import Any, NamedTuple

from mindrlhf.rewards.columns import decode

MESSAGES = "prompt"  # field of a row: its messages as JSON

OWN_SAMPLE = ("prompt", "completion", "fields", "ground_truth")
VERL_SAMPLE = ("data_source", "solution_str", "ground_truth", "extra_info")
TRL_BATCH = ("prompts", "completions", "prompt_ids", "completion_ids", "trainer_state", "log_metric", "log_extra")
VERL_BATCH = ("data_sources", "solution_strs", "ground_truths", "extra_infos")
IDS = ("prompt_ids", "completion_ids")


class Sample(NamedTuple):
    """Texts and fields of a sample; its token ids where they are known.

    objects: columns that are no texts, for functions of the calling program.
    """

    prompt: str
    completion: str
    fields: Mapping[str, str]
    prompt_ids: Sequence[int] | None = None
    completion_ids: Sequence[int] | None = None
    objects: Mapping[str, Any] = MappingProxyType({})


class Steps(NamedTuple):
    """Progress of the training that asks for rewards, in steps."""

    done: int = 0
    total: int = 0


class TrainerState:
    """Progress of the training under TRL's names: `global_step` steps are done of `max_steps`."""

    def __init__(self, steps: Steps):
        self.global_step, self.max_steps = steps

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"trainer_state has global_step and max_steps here, and no {name}")


class Logged:
    """Values that a batch function logs by `log_metric(name, value)` and `log_extra(column, values)`."""

    def __init__(self, count: int):
        self._count = count
        self._metrics: dict[str, list[float]] = {}
        self._columns: dict[str, list[Any]] = {}

    def log_metric(self, name: str, value: float) -> None:
        """Take a number of the batch."""
        self._metrics.setdefault(name, []).append(float(value))

    def log_extra(self, column: str, values: Iterable[Any]) -> None:
        """Take a value of each sample."""
        values = list(values)
        if len(values) != self._count:
            raise ValueError(f"log_extra got {len(values)} values of {column!r} for {self._count} completions")
        self._columns[column] = values

    def of(self, index: int) -> dict[str, Any]:
        """Return the values of a sample by name; a metric is its mean."""
        means = {name: fmean(values) for name, values in self._metrics.items()}
        return means | {name: values[index] for name, values in self._columns.items()}


def sample_arguments(sample: Sample) -> dict[str, Any]:
    """Collect all arguments for one sample; without `ground_truth` if its row has none."""
    row = {**decode(sample.fields), **sample.objects}
    truth = {} if row.get("ground_truth") is None else {"ground_truth": row["ground_truth"]}
    texts = {"prompt": sample.prompt, "completion": sample.completion, "solution_str": sample.completion}
    return {**texts, **truth, "fields": row, "data_source": _data_source(row), "extra_info": _extra_info(row)}


def trl_arguments(samples: Sequence[Sample], steps: Steps, logged: Logged) -> dict[str, Any]:
    """Collect all arguments of TRL's form, without token ids that are not known."""
    rows = [{**decode(sample.fields), **sample.objects} for sample in samples]
    prompts = []
    completions = []
    for sample, row in zip(samples, rows, strict=True):
        messages = row.pop(MESSAGES, None)
        talks = isinstance(messages, list)
        prompts.append(messages if talks else sample.prompt)
        completions.append([{"role": "assistant", "content": sample.completion}] if talks else sample.completion)
    names = dict.fromkeys(name for row in rows for name in row)
    columns = {name: [row.get(name) for row in rows] for name in names}
    ids = {name: [listed(getattr(sample, name)) for sample in samples] for name in IDS}
    logs = {"log_metric": logged.log_metric, "log_extra": logged.log_extra}
    known = {name: values for name, values in ids.items() if None not in values}
    texts = {"prompts": prompts, "completions": completions}
    return {**columns, **texts, **known, "trainer_state": TrainerState(steps), **logs}


def listed(ids: Iterable[int] | None) -> list[int] | None:
    """Write token ids as a list of Python's integers."""
    return None if ids is None else list(map(int, ids))


def verl_arguments(samples: Sequence[Sample]) -> dict[str, Any]:
    """Collect all arguments of verl's form for a batch."""
    rows = [decode(sample.fields) for sample in samples]
    return {
        "data_sources": [_data_source(row) for row in rows],
        "solution_strs": [sample.completion for sample in samples],
        "ground_truths": [row.get("ground_truth") for row in rows],
        "extra_infos": [_extra_info(row) for row in rows],
    }


def _data_source(row: Mapping[str, Any]) -> Any:
    given = row.get("data_source")
    return row.get("task", "") if given is None else given


def _extra_info(row: Mapping[str, Any]) -> Any:
    given = row.get("extra_info")
    if isinstance(given, str):  # earlier files do not say that it is JSON
        return json.loads(given)
    return {} if given is None else given


def finished(returned: Any) -> Any:
    """Wait for a result that is awaitable."""
    if not inspect.isawaitable(returned):
        return returned
    (result,) = run_all([returned])
    if isinstance(result, BaseException):
        raise result
    return result


def run_all(awaitables: Iterable[Awaitable[Any]]) -> list[Any]:
    """Await several objects at the same time; an error takes a result's place.

    They run in a separate thread: the caller's thread may have an event loop already, as in a notebook.
    """
    import asyncio  # takes longer to import than functions without it take to start
    from concurrent.futures import ThreadPoolExecutor

    async def gather() -> list[Any]:
        return await asyncio.gather(*awaitables, return_exceptions=True)

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(lambda: asyncio.run(gather())).result()
