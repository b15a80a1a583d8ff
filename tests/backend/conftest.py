"""The fused CPU operators, which tests of this folder share."""

import mindspore
import pytest

from mindrlhf.backend import native
from mindrlhf.backend.native.operators import operators


@pytest.fixture(scope="module")
def fused():
    mindspore.set_context(mode=mindspore.GRAPH_MODE, device_target="CPU")
    found = operators()
    if found is None:
        assert native.library().problem == "g++ is not installed"
        pytest.skip(f"the fused operators cannot be built here: {native.library().problem}")
    return found
