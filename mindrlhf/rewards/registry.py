"""Reward functions by name: shipped ones, functions of a module, functions of a file."""

import difflib
import importlib
import importlib.util
import inspect
import json
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from mindrlhf.errors import UserError

# Imported on use, so that a process loads only what its functions need (math-verify takes half a second).
SHIPPED = {
    "gsm8k": "mindrlhf.rewards.gsm8k:gsm8k",
    "gsm8k_strict": "mindrlhf.rewards.gsm8k:gsm8k_strict",
    "math": "mindrlhf.rewards.math:math",
    "format": "mindrlhf.rewards.format:format",
    "countdown": "mindrlhf.rewards.countdown:countdown",
    "knights_and_knaves": "mindrlhf.rewards.knights_and_knaves:knights_and_knaves",
    "length": "mindrlhf.rewards.length:length",
    "soft_overlong": "mindrlhf.rewards.length:soft_overlong",
    "repetition_penalty": "mindrlhf.rewards.repetition:repetition_penalty",
}
# Of these, the ones that compare with a ground truth; a function of the user's says so by a parameter of that name.
COMPARING = frozenset({"gsm8k", "gsm8k_strict", "math", "countdown", "knights_and_knaves"})


@dataclass(frozen=True)
class RewardFunction:
    """A reward function bound to its arguments; needs_ground_truth: it fails for a row without one."""

    call: Callable[[str, str, Mapping[str, str]], Any]
    needs_ground_truth: bool

    def __call__(self, prompt: str, completion: str, fields: Mapping[str, str]) -> Any:
        return self.call(prompt, completion, fields)


def resolve(name: str, args: Mapping[str, Any] | None = None) -> RewardFunction:
    """The function that `name` stands for, bound to `args`: `resolve(...)(prompt, completion, fields)`.

    name: one of SHIPPED, `package.module:function`, or `path/file.py:function` (relative to the working directory).
    Imports the function's module. UserError when there is no such name, file, module or function, when the import
    fails, and when the function cannot take these arguments.
    """
    target = SHIPPED.get(name, name)
    place, colon, function_name = target.rpartition(":")
    if not (colon and place and function_name):
        raise UserError(
            f"reward {name!r} is not known{_nearest(name, SHIPPED)}; give one of {', '.join(SHIPPED)}, "
            "package.module:function, or path/file.py:function."
        )
    module = _load_file(name, place) if place.endswith(".py") else _load_module(name, place)
    function = getattr(module, function_name, None)
    if function is None:
        functions = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise UserError(f"reward {name!r}: {place} has no {function_name!r}{_nearest(function_name, functions)}.")
    if not callable(function):
        raise UserError(
            f"reward {name!r}: {function_name!r} in {place} is not a function, but {type(function).__name__}."
        )
    return _bind(name, function, dict(args or {}))


def absolute(name: str) -> str:
    """`path/file.py:function` with an absolute path, any other name as it is: then it means the same everywhere."""
    place, colon, function_name = name.rpartition(":")
    return f"{Path(place).absolute()}:{function_name}" if colon and place.endswith(".py") else name


def _bind(name: str, function: Callable[..., Any], args: dict[str, Any]) -> RewardFunction:
    def call(prompt: str, completion: str, fields: Mapping[str, str]) -> Any:
        return function(prompt, completion, fields, **args)

    try:
        signature = inspect.signature(function)
    except ValueError:  # some functions written in C have none: the first call tells
        return RewardFunction(call, False)
    form = next((form for form in _FORMS if tuple(signature.parameters)[: len(form)] == form), _FULL)
    try:
        signature.bind(*form, **args)
    except TypeError as error:
        call = f"({', '.join([*form, *(f'{key}=...' for key in args)])})"
        raise UserError(f"reward {name!r}: the function cannot be called as {call}: {error}.") from None
    if form is _FULL:
        return RewardFunction(call, name in COMPARING)
    truth = signature.parameters["ground_truth"].default
    absent = {} if truth is inspect.Parameter.empty else {"ground_truth": truth}

    def call_form(prompt: str, completion: str, fields: Mapping[str, str]) -> Any:
        return function(*_FORMS[form](completion, {**absent, **fields}), **args)

    return RewardFunction(call_form, not absent)


def _verl_values(completion: str, fields: Mapping[str, Any]) -> tuple[Any, ...]:
    extra_info = json.loads(fields.get("extra_info", "{}"))
    return fields.get("data_source", fields.get("task", "")), completion, fields["ground_truth"], extra_info


# Names of the leading parameters -> the values for them. A function with others is called as _FULL.
_FULL = ("prompt", "completion", "fields")
_FORMS: dict[tuple[str, ...], Callable[..., tuple[Any, ...]]] = {
    ("completion", "ground_truth"): lambda completion, fields: (completion, fields["ground_truth"]),
    ("data_source", "solution_str", "ground_truth", "extra_info"): _verl_values,
    ("data_source", "solution_str", "ground_truth"): lambda *given: _verl_values(*given)[:3],
}


def _load_file(name: str, place: str) -> ModuleType:
    path = Path(place).absolute()
    if not path.is_file():
        raise UserError(f"reward {name!r}: there is no file {path}.")
    module_name = str(path)  # no dotted name can be the same
    if module_name in sys.modules:
        return sys.modules[module_name]
    spec = importlib.util.spec_from_file_location(module_name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))  # so that it can import its neighbours
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[module_name]
        raise _import_failed(name, place, error) from None
    return module


def _load_module(name: str, place: str) -> ModuleType:
    try:
        return importlib.import_module(place)
    except (Exception, SystemExit) as error:
        if isinstance(error, ModuleNotFoundError) and error.name and f"{place}.".startswith(f"{error.name}."):
            raise UserError(f"reward {name!r}: there is no module {error.name!r} on the Python path.") from None
        raise _import_failed(name, place, error) from None


def _import_failed(name: str, place: str, error: BaseException) -> UserError:
    if isinstance(error, SyntaxError):
        where = f"{error.filename}, line {error.lineno}"
    else:
        last = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{last.filename}, line {last.lineno}"
    return UserError(f"reward {name!r}: importing {place} fails with {type(error).__name__}: {error} ({where}).")


def _nearest(name: str, known: Mapping[str, Any] | list[str]) -> str:
    found = difflib.get_close_matches(name, known, n=1)
    return f" (nearest: {found[0]!r})" if found else ""
