"""Reward functions by name: shipped, of a module, or of a file."""

import inspect
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mindrlhf.errors import UserError
from mindrlhf.rewards.batches import COMPLETIONS, NOT_GIVEN, PROMPTS, Sample, batch_columns, finished, takes_batch
from mindrlhf.rewards.columns import decode, value_of
from mindrlhf.user_functions import hint, is_user_function, load_function

# Imported on use, so that a process loads only what its functions need (math-verify takes half a second).
SHIPPED = {
    "gsm8k": "mindrlhf.rewards.gsm8k:gsm8k",
    "gsm8k_strict": "mindrlhf.rewards.gsm8k:gsm8k_strict",
    "openai/gsm8k": "mindrlhf.rewards.gsm8k:gsm8k_strict",
    "math": "mindrlhf.rewards.math:math",
    "verl": "mindrlhf.rewards.verl:verl",
    "format": "mindrlhf.rewards.form:format",
    "countdown": "mindrlhf.rewards.countdown:countdown",
    "knights_and_knaves": "mindrlhf.rewards.knights_and_knaves:knights_and_knaves",
    "length": "mindrlhf.rewards.form:length",
    "soft_overlong": "mindrlhf.rewards.form:soft_overlong",
    "repetition_penalty": "mindrlhf.rewards.form:repetition_penalty",
    "environment": "mindrlhf.rewards.form:environment",
}
# The shipped functions that compare with a ground truth; a user's function shows it by a parameter of that name.
COMPARING = frozenset({"gsm8k", "gsm8k_strict", "openai/gsm8k", "math", "verl", "countdown", "knights_and_knaves"})


@dataclass(frozen=True)
class RewardFunction:
    """Reward function bound to its arguments.

    values: (prompt, completion, fields) -> leading arguments. needs_ground_truth: it fails for a row without one.
    defaults: fields for a row that lacks them. takes_batch: it is called by `of_batch`, with the named `columns`, or
    with all columns if that is None.
    """

    function: Callable[..., Any]
    args: Mapping[str, Any]
    values: Callable[..., tuple[Any, ...]]
    needs_ground_truth: bool = False
    defaults: Mapping[str, Any] = field(default_factory=dict)
    takes_batch: bool = False
    columns: Collection[str] | None = None

    def __call__(self, prompt: str, completion: str, fields: Mapping[str, str]) -> Any:
        fields = {**self.defaults, **fields} if self.defaults else fields
        return finished(self.function(*self.values(prompt, completion, fields), **self.args))

    def of_batch(self, samples: Sequence[Sample]) -> Any:
        """Call a function of TRL's form once for all samples."""
        return finished(self.begin_batch(samples))

    def begin_batch(self, samples: Sequence[Sample]) -> Any:
        """Call as `of_batch`; the result may be awaitable."""
        given = batch_columns(samples)
        wanted = given if self.columns is None else {name: given[name] for name in self.columns if name in given}
        return self.function(**{**wanted, **self.args})


def resolve(name: str, args: Mapping[str, Any] | None = None) -> RewardFunction:
    """Find a reward function by `name` and bind it to `args`; imports its module.

    name: one of SHIPPED, `package.module:function`, or `path/file.py:function` (relative to the working directory).
    UserError for a name that leads to no function, a failing import, and arguments that the function cannot take.
    """
    target = SHIPPED.get(name, name)
    if not is_user_function(target):
        raise UserError(
            f"reward {name!r} is not known{hint(name, SHIPPED)}; give one of {', '.join(SHIPPED)}, "
            "package.module:function, or path/file.py:function."
        )
    return bind(load_function("reward", target), name, args)


def bind(function: Callable[..., Any], name: str, args: Mapping[str, Any] | None = None) -> RewardFunction:
    """Bind a function, called `name` in messages, to `args`; raises as `resolve`."""
    args = dict(args or {})
    try:
        signature = inspect.signature(function)
    except ValueError:  # some functions written in C have none: the first call will show
        return RewardFunction(function, args, _FORMS[_FULL])
    if takes_batch(signature.parameters):
        return _of_batch(function, signature, name, args)
    form = next((form for form in _FORMS if tuple(signature.parameters)[: len(form)] == form), _FULL)
    try:
        signature.bind(*form, **args)
    except TypeError as error:
        call = f"({', '.join([*form, *(f'{key}=...' for key in args)])})"
        raise UserError(f"reward {name!r}: the function cannot be called as {call}: {error}.") from None
    if form is _FULL:
        return RewardFunction(function, args, _FORMS[form], name in COMPARING)
    truth = signature.parameters["ground_truth"].default
    defaults = {} if truth is inspect.Parameter.empty else {"ground_truth": truth}
    return RewardFunction(function, args, _FORMS[form], not defaults, defaults)


def _of_batch(
    function: Callable[..., Any], signature: inspect.Signature, name: str, args: Mapping[str, Any]
) -> RewardFunction:
    kinds = inspect.Parameter
    named = {
        one.name: one.default is kinds.empty
        for one in signature.parameters.values()
        if one.kind is not kinds.VAR_KEYWORD
    }
    absent = [key for key, needed in named.items() if needed and key in NOT_GIVEN and key not in args]
    if absent:
        right = f"take {PROMPTS}, {COMPLETIONS} and the dataset's columns"
        raise UserError(f"reward {name!r}: the function needs {absent[0]}, which is not given here; {right}.")
    every = len(named) < len(signature.parameters)
    if unknown := [key for key in args if key not in named and not every]:
        raise UserError(f"reward {name!r}: the function has no parameter {unknown[0]!r}; take it out of args.")
    compares = named.get("ground_truth", False) and "ground_truth" not in args
    columns = None if every else tuple(named)
    return RewardFunction(function, args, _FORMS[_FULL], compares, takes_batch=True, columns=columns)


def _verl_values(prompt: str, completion: str, fields: Mapping[str, Any]) -> tuple[Any, ...]:
    row = decode(fields)
    extra_info = row.get("extra_info")
    if isinstance(extra_info, str):  # earlier files do not say that it is JSON
        extra_info = json.loads(extra_info)
    truth = row["ground_truth"]
    return row.get("data_source", row.get("task", "")), completion, truth, {} if extra_info is None else extra_info


# Names of the leading parameters -> the values for them. A function with other names is called as _FULL.
_FULL = ("prompt", "completion", "fields")
_FORMS: dict[tuple[str, ...], Callable[..., tuple[Any, ...]]] = {
    _FULL: lambda *given: given,
    ("completion", "ground_truth"): lambda prompt, completion, fields: (completion, value_of(fields, "ground_truth")),
    ("data_source", "solution_str", "ground_truth", "extra_info"): _verl_values,
    ("data_source", "solution_str", "ground_truth"): lambda *given: _verl_values(*given)[:3],
}
