"""All checks up to a level, in the order in which they run."""

from collections.abc import Sequence

from mindrlhf.acceptance.checks import LEVELS, Check, Level
from mindrlhf.backend.device import Device
from mindrlhf.errors import UserError


def offered_dtypes(device: Device) -> list[str]:
    """List the input dtypes of products that the device has on this machine."""
    found = []
    for dtype in device.product_dtypes:
        try:
            found.append(device.product_dtype(dtype))
        except UserError:  # not on this machine
            continue
    return found


def all_checks(device: Device, level: Level, ranks: int) -> list[Check]:
    """List the checks of a level and of the levels before it.

    ranks: processes of the checks that several run together; collectives also run on one.
    """
    from mindrlhf.acceptance.answers import answer_checks
    from mindrlhf.acceptance.layers import layer_checks
    from mindrlhf.acceptance.models import model_checks
    from mindrlhf.acceptance.operators import operator_checks
    from mindrlhf.acceptance.oracle import oracle_checks
    from mindrlhf.acceptance.ranks import rank_checks
    from mindrlhf.acceptance.runs import run_checks
    from mindrlhf.acceptance.swap import memory_checks

    dtypes = offered_dtypes(device)
    activations = sorted({device.activations(dtype) for dtype in dtypes})
    checks = [
        *answer_checks(),
        *operator_checks(dtypes),
        *memory_checks(),
        *layer_checks(dtypes),
        *model_checks(dtypes),
        *oracle_checks(activations),
    ]
    for count in sorted({1, ranks}):
        checks += rank_checks(activations, count)
    checks += run_checks(ranks)
    included = LEVELS[: LEVELS.index(level) + 1]
    return sorted((one for one in checks if one.level in included), key=lambda one: LEVELS.index(one.level))


def matching(checks: Sequence[Check], words: Sequence[str]) -> list[Check]:
    """Select the checks with one of the words in their names.

    Without words all are selected. Raises UserError if there is none.
    """
    found = [one for one in checks if not words or any(word in one.name for word in words)]
    if not found:
        raise UserError(f"--only: no check of this level has {' or '.join(map(repr, words))} in its name.")
    return found
