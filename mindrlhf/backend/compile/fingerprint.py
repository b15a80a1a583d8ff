"""What a graph is made of, as a digest: the same in every process that would compile the same graph.

A graph follows from the code and from what its Cells hold: numbers, texts, arrays, other Cells, operators, functions
with what they close over. Of a Parameter name, shape and dtype count, and not the numbers in it.
"""

import functools
import hashlib
import inspect
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from enum import Enum
from fractions import Fraction
from pathlib import Path, PurePath
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import mindspore
import numpy as np
from mindspore import Parameter, Tensor, nn, ops

_PLAIN = (type(None), bool, int, float, complex, str, bytes, Fraction, PurePath, Enum, range, slice)
PACKAGE = Path(__file__).resolve().parents[1]


class Unknown(TypeError):
    """Something is in the graph of which this module cannot say what it is."""


def fingerprint(graph: nn.Cell, *more: Any) -> str:
    """Hex digest of a graph, of the code, and of `more`. Raises `Unknown`."""
    digest = hashlib.sha256()
    for part in (code_digest(), *_parts(graph, {}), *_parts(more, {})):
        digest.update(part if isinstance(part, bytes) else repr(part).encode())
        digest.update(b"\0")
    return digest.hexdigest()


@functools.cache
def code_digest() -> str:
    """Of everything that is code: this package, MindSpore, Python, and what else is loaded that is not installed."""
    digest = hashlib.sha256(f"{mindspore.__version__} {sys.version}".encode())
    for path in sorted({*PACKAGE.rglob("*.py"), *_loaded_code()}):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _loaded_code() -> Iterator[Path]:
    """A user's own modules."""
    installed = [Path(sysconfig.get_paths()[name]).resolve() for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    for module in list(sys.modules.values()):
        path = Path(getattr(module, "__file__", None) or "-").resolve()
        if path.suffix == ".py" and path.is_file() and not any(path.is_relative_to(folder) for folder in installed):
            yield path


# What MindSpore, and a Graph, note in a Cell that it has compiled.
_NOTES = {
    "_known_phases",
    "current_phase",
    "sequence_modified",
    "_func_graph_flags",
    "__compile_cell_hook__",
    "__parse_method__",
}


@functools.cache
def _of_every_cell() -> frozenset[str]:
    """Attributes that MindSpore gives each Cell: names of phases, moments, settings of its own trainer."""
    given = frozenset(vars(nn.Cell(auto_prefix=False))) - {"_cells", "_params", "_buffers", "_primitives"}
    return given | _NOTES


def _parts(value: Any, seen: dict[int, tuple[int, Any]]) -> Iterator[Any]:
    """Bytes and things with a `repr` that tells them apart.

    seen: id -> number of what has been told already, and the thing itself: another may not get its id meanwhile.
    """
    if isinstance(value, _PLAIN):
        yield type(value).__name__, value
        return
    if isinstance(value, mindspore.dtype.Type | np.dtype):
        yield str(value)
        return
    if id(value) in seen:
        yield "seen", seen[id(value)][0]
        return
    seen[id(value)] = len(seen), value
    yield type(value).__module__, type(value).__qualname__
    if isinstance(value, Parameter):
        yield value.name, value.shape, str(value.dtype), value.requires_grad
    elif isinstance(value, Tensor):
        yield from _parts(value.asnumpy(), {})
    elif isinstance(value, np.ndarray | np.generic):
        yield value.shape, str(value.dtype)
        yield np.ascontiguousarray(value).tobytes()
    elif isinstance(value, Mapping):
        yield len(value)
        for key in value:
            yield from _parts(key, seen)
            yield from _parts(value[key], seen)
    elif isinstance(value, tuple | list):
        yield len(value)
        for item in value:
            yield from _parts(item, seen)
    elif isinstance(value, set | frozenset):
        yield sorted(map(repr, value))
    elif isinstance(value, functools.partial):
        yield from _parts((value.func, value.args, value.keywords), seen)
    elif isinstance(value, MethodType):
        yield value.__func__.__qualname__
        yield from _parts(value.__self__, seen)
    elif isinstance(value, FunctionType):
        variables = inspect.getclosurevars(value)
        closure = dict(variables.nonlocals)
        closure.pop("hash_obj", None)  # the moment at which `ops.grad` and its like were called
        yield value.__module__, value.__qualname__, *_code(value.__code__)
        yield from _parts((closure, _plain(variables.globals), value.__defaults__, value.__kwdefaults__), seen)
    elif isinstance(value, type | ModuleType | BuiltinFunctionType):
        yield getattr(value, "__module__", ""), getattr(value, "__qualname__", value.__name__)
    elif isinstance(value, nn.Cell):
        given = _of_every_cell()
        own = {name: held for name, held in vars(value).items() if name not in given}
        yield from _parts((own, _globals_of(type(value))), seen)
    elif isinstance(value, ops.Primitive):
        yield value.name, sorted((name, str(attribute)) for name, attribute in value.attrs.items())
    elif type(value).__module__.startswith("mindspore."):  # what takes gradients, and how
        yield sorted((name, held) for name, held in vars(value).items() if isinstance(held, bool))
    elif type(value).__module__.partition(".")[0] == PACKAGE.name or hasattr(value, "__dataclass_fields__"):
        yield from _parts(_attributes(value), seen)
    else:
        raise Unknown(f"{type(value).__module__}.{type(value).__qualname__}")


def _code(code: CodeType) -> Iterator[Any]:
    """What tells a function from another of the same name, on the same line maybe."""
    yield code.co_code, code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _code(constant)
        else:
            yield sorted(map(repr, constant)) if isinstance(constant, frozenset) else constant


def _plain(variables: Mapping[str, Any]) -> dict[str, Any]:
    """Those that a module may have from elsewhere, such as its environment; all else is in its source."""
    return {name: value for name, value in sorted(variables.items()) if isinstance(value, _PLAIN)}


def _globals_of(kind: type[nn.Cell]) -> dict[str, Any]:
    """The global numbers and texts that a Cell computes with."""
    methods = (getattr(kind, name, None) for name in ("construct", "bprop"))
    found = [inspect.getclosurevars(method).globals for method in methods if isinstance(method, FunctionType)]
    return _plain({name: value for each in found for name, value in each.items()})


def _attributes(value: Any) -> dict[str, Any]:
    slots = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
    return {**getattr(value, "__dict__", {}), **{name: getattr(value, name) for name in slots if hasattr(value, name)}}
