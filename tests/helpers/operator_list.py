"""Names of the operators of `mindrlhf.backend.operators`."""

import inspect

from mindrlhf.backend.operators import ModelOperators, Operators


def listed(protocol) -> set[str]:
    """Names of a protocol's own operators."""
    return {name for name, value in vars(protocol).items() if inspect.isroutine(value) and not name.startswith("_")}


LIST = listed(ModelOperators) | listed(Operators)
