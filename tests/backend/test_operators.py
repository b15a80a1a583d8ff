"""The list of operators: every device has each of them, and the C++ declares itself to the list."""

import inspect

import pytest
from operator_list import LIST, listed

from mindrlhf.backend.ascend_operators import AscendAttention, AscendOperators
from mindrlhf.backend.native import names
from mindrlhf.backend.native.operators import DECLARED, NativeOperators
from mindrlhf.backend.operators import ComposedOperators, ModelOperators, Operators

pytestmark = pytest.mark.fast


def test_the_list_is_not_empty():
    assert {"linear", "group_attention", "adamw"} <= listed(Operators)
    assert {"half", "decode_tokens", "token_log_probs"} <= listed(ModelOperators)


@pytest.mark.parametrize("name", sorted(LIST))
def test_an_operator_says_what_it_computes(name):
    assert inspect.getdoc(getattr(Operators, name))


@pytest.mark.parametrize("name", sorted(LIST))
@pytest.mark.parametrize("device", [ComposedOperators, AscendOperators, AscendAttention, NativeOperators])
def test_a_device_takes_the_arguments_of_the_list(device, name):
    expected, found = (inspect.signature(getattr(one, name)).parameters for one in (Operators, device))
    assert [key for key in found if key != "self"] == [key for key in expected if key != "self"]


def test_the_cpp_declares_itself_to_every_operator_of_the_list():
    assert DECLARED.keys() == LIST
    composed = {name for name, entries in DECLARED.items() if not entries}
    assert composed <= listed(Operators), "an operator without a composed form needs an entry point"


def test_declared_entry_points_are_those_that_the_headers_define():
    declared = [entry.name for entries in DECLARED.values() for entry in entries]
    assert sorted(declared) == sorted(names.entry_points())
    assert names.entry_points()["decode_tokens"] == ("float32", "bfloat16", "int8")


def test_the_library_has_every_entry_point(fused):
    import ctypes

    from mindrlhf.backend.native import library

    built = ctypes.CDLL(str(library().path))
    for name, dtypes in names.entry_points().items():
        for dtype in dtypes:
            assert getattr(built, name if dtype == "float32" else f"{name}_{dtype}")
