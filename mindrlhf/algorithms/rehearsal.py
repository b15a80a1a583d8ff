"""Trials of a user's advantage and policy loss on small numbers."""

import os
import tempfile
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from mindrlhf.algorithms.advantages import AdvantageMethod, RewardBatch
from mindrlhf.algorithms.losses import PolicyLoss
from mindrlhf.errors import UserError

GROUPS, SAMPLES = SHAPE = (2, 4)  # of rewards; rows and tokens of a loss
ADVANTAGE_FORM = "it must return a list with one array for each group, and in it a number for each response"
LOSS_FORM = "it must return the losses float32[B, T] and a dict of metrics float32[B, T], 0 on padding"


def rehearse_advantage(method: AdvantageMethod, options: Mapping[str, Any]) -> None:
    """Compute advantages of two groups of four rewards.

    Raises UserError for a function that fails, returns another form, or gives numbers that are not finite.
    """
    rewards = [np.array([1.0, 0.0, 0.5, 0.0]), np.array([0.0, 1.0, 1.0, 0.25])]
    lengths = [np.array([3, 1, 4, 2]), np.array([2, 2, 1, 4])]
    tokens = [[np.linspace(-0.1, 0.1, length) for length in group] for group in lengths]
    batch = RewardBatch(
        rewards=rewards,
        lengths=lengths,
        values=tokens if method.uses_values else None,
        greedy_rewards=[0.5, 0.0] if method.uses_greedy else None,
        rewards_by_function=[{"reward": group} for group in rewards],
        function_weights={"reward": 1.0},
        teacher_log_ratios=tokens if method.uses_teacher else None,
    )
    what = f"advantage {method.name!r}"
    with _explaining(f"{what}: fails on {GROUPS} groups of {SAMPLES} rewards"):
        groups = method.function(batch, **method.checked(options))
    if not isinstance(groups, list | tuple | np.ndarray) or len(groups) != GROUPS:
        raise UserError(f"{what}: gives {_shown(groups)} for {GROUPS} groups of {SAMPLES} rewards; {ADVANTAGE_FORM}.")
    for group, counts in zip(groups, lengths, strict=True):
        if not isinstance(group, list | tuple | np.ndarray) or len(group) != SAMPLES:
            raise UserError(f"{what}: gives {_shown(group)} for a group of {SAMPLES} rewards; {ADVANTAGE_FORM}.")
        for one, count in zip(group, counts, strict=True):
            _check_sample(what, one, int(count))


def _check_sample(what: str, one: Any, length: int) -> None:
    """Check a sample's advantage: a finite number, or one for each token."""
    try:
        numbers = np.asarray(one, np.float64)
    except (TypeError, ValueError):
        raise UserError(f"{what}: gives {_shown(one)} for a response; {ADVANTAGE_FORM}.") from None
    if numbers.shape not in ((), (length,)):
        raise UserError(f"{what}: gives {numbers.size} numbers for a response of {length} tokens; {ADVANTAGE_FORM}.")
    if not np.isfinite(numbers).all():
        raise UserError(f"{what}: gives {_shown(one)} for finite rewards; look for a division by 0, or a log of it.")


def rehearse_loss(loss: PolicyLoss) -> None:
    """Compile and run a loss and its gradient on two rows.

    Each has four tokens. Raises UserError for a function that fails, returns another form, or gives numbers that are
    not finite. The current folder is another one meanwhile: MindSpore writes a file about a graph that it cannot
    compile there.
    """
    from mindspore import Tensor, jit, ops

    mask = np.array([[1, 1, 1, 1], [1, 1, 1, 0]], np.float32)
    now = np.array([[-1.0, -0.5, -2.0, -0.1], [-0.7, -1.5, -0.3, -1.0]], np.float32)
    old = now + np.float32(0.05)
    advantages = np.array([[1.0], [-0.5]], np.float32) * mask
    arrays = [now, old, advantages, mask]
    if loss.select is not None:
        arrays.append(np.array([[1, 0, 0, 0], [0, 1, 0, 0]], np.float32))
    what = f"policy loss {loss.name!r}"

    def summed(*tensors):
        losses, metrics = loss.losses(*tensors)
        return losses.sum(), metrics

    with _explaining(f"{what}: fails on {GROUPS} rows of {SAMPLES} tokens"), _elsewhere():
        tensors = [Tensor(array) for array in arrays]
        given = loss.losses(*tensors)
        _check_losses(what, given, Tensor)
        gradient = jit(ops.value_and_grad(summed, 0, None, has_aux=True))(*tensors)[1].asnumpy()
    for name, numbers in {"a loss": given[0].asnumpy(), "a gradient": gradient}.items():
        if not np.isfinite(numbers).all():
            raise UserError(f"{what}: gives {name} that is not finite for {GROUPS} rows of {SAMPLES} tokens.")


def _check_losses(what: str, given: Any, tensor: type[Any]) -> None:
    if not isinstance(given, tuple) or len(given) != 2 or not isinstance(given[1], dict):
        raise UserError(f"{what}: gives {_shown(given)}; {LOSS_FORM}.")
    for name, one in {"losses": given[0], **{f"metric {name}": value for name, value in given[1].items()}}.items():
        if not isinstance(one, tensor) or one.shape != SHAPE:
            shape = f"shape {tuple(one.shape)}" if isinstance(one, tensor) else _shown(one)
            raise UserError(f"{what}: {name} for {GROUPS} rows of {SAMPLES} tokens: {shape}; {LOSS_FORM}.")


def _shown(value: Any) -> str:
    """Describe a value: `a list of 3`, `nan`, `'text'`."""
    if isinstance(value, list | tuple | dict):
        return f"a {type(value).__name__} of {len(value)}"
    if isinstance(value, np.ndarray):
        return f"an array {list(value.shape)}"
    return f"{type(value).__name__} {value!r:.40}" if not isinstance(value, float) else f"{value:g}"


@contextmanager
def _explaining(problem: str) -> Iterator[None]:
    """Turn any error of a user's function into a UserError with its place."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "mindspore" not in frame.filename]
        frame = next((one for one in reversed(frames) if one.filename != __file__), None)
        place = f" ({frame.filename}, line {frame.lineno})" if frame else ""
        reason = (str(error).strip().splitlines() or [""])[0].rstrip(".")
        raise UserError(f"{problem} with {type(error).__name__}: {reason}{place}.") from error


@contextmanager
def _elsewhere() -> Iterator[None]:
    """Work in a temporary folder."""
    home = os.getcwd()
    with tempfile.TemporaryDirectory(prefix="mindrlhf-") as folder:
        os.chdir(folder)
        try:
            yield
        finally:
            os.chdir(home)
