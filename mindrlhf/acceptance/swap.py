"""Checks of parameter memory.

Writes that graphs see, and memory that goes away and comes back.
"""

from collections.abc import Iterator

import numpy as np

from mindrlhf import backend
from mindrlhf.acceptance.checks import Check, Finding, Trial, same_bits
from mindrlhf.acceptance.graphs import parameter
from mindrlhf.acceptance.inputs import numbers
from mindrlhf.acceptance.operators import seen_by_graph
from mindrlhf.backend.memory import open_store, zero_parameter

SHAPES = ((300, 64), (128,), (3, 2, 32))


def _held(kind: str) -> tuple[list[np.ndarray], list]:
    """Draw arrays, and make parameters of them."""
    arrays = [numbers(f"{kind} {i}", *shape) for i, shape in enumerate(SHAPES)]
    return arrays, [parameter(f"acceptance.{i}", array) for i, array in enumerate(arrays)]


def check_writes(trial: Trial) -> Iterator[Finding]:
    """Check that graphs see what `backend.write` and `backend.rewriting` have written."""
    before, held = _held("before")
    after = [numbers(f"after {i}", *shape) for i, shape in enumerate(SHAPES)]
    for i, (own, expected) in enumerate(zip(seen_by_graph(held), before, strict=True)):
        yield same_bits(f"graph's first reading of {i}", own, expected)
    for one, array in zip(held, after, strict=True):
        backend.write(one, array)
    for i, (own, expected) in enumerate(zip(seen_by_graph(held), after, strict=True)):
        yield same_bits(f"graph's reading of {i} after a write", own, expected)
    with backend.rewriting({str(i): one for i, one in enumerate(held)}) as arrays:
        for array in arrays.values():
            array[1:] *= 2
    for i, (own, expected) in enumerate(zip(seen_by_graph(held), after, strict=True)):
        expected = expected.copy()
        expected[1:] *= 2
        yield same_bits(f"graph's reading of {i} after rewriting", own, expected)
        yield same_bits(f"host's reading of {i} after rewriting", backend.read(held[i]), expected)


def check_swap(trial: Trial) -> Iterator[Finding]:
    """Check that parameters come back with the content that was kept, twice."""
    arrays, held = _held("swapped")
    store = open_store(trial.device, held, trial.folder)
    for turn in ("first", "second"):
        store.put_away(keep=True)
        store.expect()
        store.bring_back()
        for i, (own, expected) in enumerate(zip(seen_by_graph(held), arrays, strict=True)):
            yield same_bits(f"graph's reading of {i} after the {turn} time", own, expected)
        arrays = [array + 1 for array in arrays]
        for one, array in zip(held, arrays, strict=True):
            backend.write(one, array)
    store.put_away(keep=True)
    store.bring_back()
    for i, (one, expected) in enumerate(zip(held, arrays, strict=True)):
        yield same_bits(f"host's reading of {i}", backend.read(one), expected)


def check_zeros(trial: Trial) -> Iterator[Finding]:
    """Check new parameters of zeros, before and after their memory is filled."""
    held = [zero_parameter(f"acceptance.{i}", shape) for i, shape in enumerate(SHAPES)]
    for when in ("new", "filled"):
        for i, own in enumerate(seen_by_graph(held)):
            yield same_bits(f"{when} zeros {i}", own, np.zeros(SHAPES[i]))
        open_store(trial.device, held, trial.folder).fill()


def memory_checks() -> Iterator[Check]:
    """List the checks of parameter memory."""
    yield Check("memory: writes", "operators", check_writes)
    yield Check("memory: out and back", "operators", check_swap)
    yield Check("memory: zeros", "operators", check_zeros)
