"""Experiences and data-parallel ranks for tests of a step's parts, without models and processes."""

import math
import threading
from dataclasses import dataclass, replace

import numpy as np
from responses import LOG_PROBS, with_advantages

from mindrlhf.parallel.data_parallel import DataParallel
from mindrlhf.token_arrays import TOKEN_ARRAYS
from mindrlhf.trainer.credit import Credit
from mindrlhf.training.optimizer import UpdateResult
from mindrlhf.training.updater import Update
from mindrlhf.types import Experience, Prompt, Rollout, RolloutGroup


def experience(prompt_id: int, rewards, lengths=None, finishes=None, policy_step: int = 1, **fields) -> Experience:
    """A scored group, all tokens sampled; log-probs are drawn from the prompt's id. fields: of `Experience` or of its
    tokens; `functions` are its rewards by function, `advantages` a number for each response.
    """
    rng = np.random.default_rng([prompt_id, 17])
    rewards = np.array(rewards, np.float64)
    lengths = [3] * len(rewards) if lengths is None else lengths
    finishes = ["eos"] * len(rewards) if finishes is None else finishes
    rollouts = tuple(
        Rollout(
            prompt_id=prompt_id,
            sample_index=index,
            response_ids=rng.integers(0, 50, length).astype(np.int32),
            finish_reason=finish,
            seed=0,
            tokens={
                "sampled": np.ones(length, bool),
                **{name: -rng.exponential(size=length).astype(np.float32) for name in LOG_PROBS},
            },
        )
        for index, (length, finish) in enumerate(zip(lengths, finishes, strict=True))
    )
    functions = {name: np.array(values, np.float64) for name, values in fields.pop("functions", {}).items()}
    group = RolloutGroup(Prompt(prompt_id, np.arange(4, dtype=np.int32)), rollouts)
    tokens = {name: fields.pop(name) for name in list(fields) if name in TOKEN_ARRAYS}
    numbers, functions = np.zeros(len(rewards), np.float32), functions or {"gsm8k": rewards}
    one = Experience(group, rewards, functions, numbers, policy_step, tokens=tokens, **fields)
    return with_advantages(one, numbers)


def without(one: Experience, *names: str) -> Experience:
    """An experience without arrays of its tokens."""
    return replace(one, tokens={name: rows for name, rows in one.tokens.items() if name not in names})


def with_context(one: Experience, seed: int = 0) -> Experience:
    """The same responses with tokens in between that nobody sampled; their log-probs and values are NaN."""
    rng = np.random.default_rng([one.group.prompt.id, seed])
    masks = [rng.permutation(np.arange(length + 1 + index) < length) for index, length in enumerate(one.lengths)]

    def among(rows, rest=np.nan):
        out = tuple(np.full(mask.shape, rest, row.dtype) for row, mask in zip(rows, masks, strict=True))
        for whole, row, mask in zip(out, rows, masks, strict=True):
            whole[mask] = row
        return out

    ids = among([rollout.response_ids for rollout in one.group.rollouts], rest=7)
    arrays = {"sampled": masks, **{name: among(one.rows(name)) for name in LOG_PROBS}}
    changed = tuple(
        replace(rollout, response_ids=ids[index], tokens={name: rows[index] for name, rows in arrays.items()})
        for index, rollout in enumerate(one.group.rollouts)
    )
    tokens = {name: among(rows) for name, rows in one.tokens.items()}
    return replace(one, group=replace(one.group, rollouts=changed), tokens=tokens)


@dataclass(frozen=True)
class Rank:
    """Stands for `DataParallel` on one of several threads that run the same code.

    One of them runs at a time, the others wait for it in `gather`: MindSpore's operators, called one by one from two
    threads at once, give wrong numbers now and then.
    """

    rank: int
    size: int
    shelf: list
    barrier: threading.Barrier
    turn: threading.Lock

    def share(self, items) -> list:
        count = len(items) // self.size
        return list(items[self.rank * count : (self.rank + 1) * count])

    def gather(self, value) -> list:
        self.shelf[self.rank] = value
        self._wait()
        values = list(self.shelf)
        self._wait()
        return values

    united = DataParallel.united

    def _wait(self) -> None:
        """For all ranks, and then for its turn."""
        self.turn.release()
        try:
            self.barrier.wait()
        finally:
            self.turn.acquire()

    def sum(self, array) -> np.ndarray:
        return np.sum(self.gather(array), axis=0)


def on_ranks(size: int, work) -> list:
    """[work(rank)] of `size` ranks at the same time."""
    shelf, barrier, turn = [None] * size, threading.Barrier(size), threading.Lock()
    results, errors = [None] * size, []

    def run(index: int) -> None:
        with turn:
            try:
                results[index] = work(Rank(index, size, shelf, barrier, turn))
            except BaseException as error:
                errors.append(error)
                barrier.abort()

    threads = [threading.Thread(target=run, args=(index,)) for index in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results


def an_update(failed: bool = False, metrics=None, outputs=(), routing=()) -> Update:
    """An update that was applied, or was skipped because it failed, with only these numbers."""
    return Update(
        result=UpdateResult(grad_norm=math.nan if failed else 1.0, learning_rate=0.1, applied=not failed),
        loss=0.0,
        metrics=metrics or {},
        weighted={},
        outputs=list(outputs),
        terms={},
        sides=(),
        optimizer_s=0.0,
        routing=routing,
    )


def rows_of(experiences, field: str):
    return [row for one in experiences for row in one.rows(field)]


def assert_same_rows(got, expected, tolerance=0.0):
    for mine, theirs in zip(got, expected, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=tolerance, atol=tolerance)


def advantages(step, settings, size):
    """The step with advantages, computed by `size` ranks of which each knows the log-probs of its own share only."""

    def work(rank: Rank):
        bare = [replace(one, tokens={}) for one in step]
        return Credit(settings, rank)(bare, rank.share(step))

    return [one for part in on_ranks(size, work) for one in part]
