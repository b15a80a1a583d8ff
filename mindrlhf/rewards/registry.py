"""Reward functions by name: shipped, of a module, or of a file."""

import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from mindrlhf.errors import UserError
from mindrlhf.user_functions import is_user_function, load_function, nearest

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
    """Reward function bound to its arguments.

    needs_ground_truth: it fails for a row without one.
    """

    call: Callable[[str, str, Mapping[str, str]], Any]
    needs_ground_truth: bool

    def __call__(self, prompt: str, completion: str, fields: Mapping[str, str]) -> Any:
        return self.call(prompt, completion, fields)


def resolve(name: str, args: Mapping[str, Any] | None = None) -> RewardFunction:
    """Find a reward function by `name` and bind it to `args`.

    The result is called as `resolve(...)(prompt, completion, fields)`.
    name: one of SHIPPED, `package.module:function`, or `path/file.py:function` (relative to the working directory).
    Imports the function's module. UserError when there is no such name, file, module or function, when the import
    fails, and when the function cannot take these arguments.
    """
    target = SHIPPED.get(name, name)
    if not is_user_function(target):
        raise UserError(
            f"reward {name!r} is not known{nearest(name, SHIPPED)}; give one of {', '.join(SHIPPED)}, "
            "package.module:function, or path/file.py:function."
        )
    function = load_function("reward", target)
    return _bind(name, function, dict(args or {}))


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
