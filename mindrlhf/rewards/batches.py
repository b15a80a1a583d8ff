"""Reward functions in TRL's form: one call for a batch, columns by name.

`f(prompts, completions, **columns)` gets lists with an element for each sample. A prompt is text; if the dataset has
messages, it is messages, and its completion is one message of the assistant. A column has the dataset's values, None in
rows without one. Unlike in TRL, token ids and the trainer's state are not given. Imports only the standard library.
"""

import inspect
from collections.abc import Awaitable, Collection, Iterable, Mapping, Sequence
from typing import Any

from mindrlhf.rewards.columns import decode

PROMPTS, COMPLETIONS = "prompts", "completions"
NOT_GIVEN = frozenset(
    ("prompt_ids", "prompts_ids", "completion_ids", "completions_ids", "trainer_state", "log_extra", "log_metric")
)
MESSAGES = "prompt"  # field of a row: its messages as JSON

Sample = tuple[str, str, Mapping[str, str]]
"""Prompt text, completion text, fields."""


def takes_batch(parameters: Collection[str]) -> bool:
    """Test a function's parameters for the names of a batch function."""
    return not {PROMPTS, COMPLETIONS, *NOT_GIVEN}.isdisjoint(parameters)


def batch_columns(samples: Sequence[Sample]) -> dict[str, list[Any]]:
    """Collect the arguments of a call."""
    rows, prompts, completions = [], [], []
    for prompt, completion, fields in samples:
        row = decode(fields)
        given = row.pop(MESSAGES, None)
        talks = isinstance(given, list)
        prompts.append(given if talks else prompt)
        completions.append([{"role": "assistant", "content": completion}] if talks else completion)
        rows.append(row)
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: [row.get(name) for row in rows] for name in names} | {PROMPTS: prompts, COMPLETIONS: completions}


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
