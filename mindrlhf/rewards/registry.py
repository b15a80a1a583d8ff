"""Reward functions by name: shipped, of a module, or of a file."""

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from inspect import Parameter
from types import MappingProxyType
from typing import Any, NoReturn

from mindrlhf.errors import UserError
from mindrlhf.rewards.batches import (
    IDS,
    OWN_SAMPLE,
    TRL_BATCH,
    VERL_BATCH,
    VERL_SAMPLE,
    Logged,
    Sample,
    Steps,
    finished,
    sample_arguments,
    trl_arguments,
    verl_arguments,
)
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


OF_SAMPLE = tuple(dict.fromkeys((*OWN_SAMPLE, *VERL_SAMPLE)))
COLUMNS = ("ground_truth", "data_source", "extra_info")  # of a sample, and usual columns
NOT_GIVEN = ("environments", "prompts_ids", "completions_ids")
ACCEPTED = (
    f"a call gives {', '.join(OF_SAMPLE)} of a sample by name, or of a batch {', '.join(TRL_BATCH)} and the rows' "
    f"columns, or {', '.join(VERL_BATCH)}"
)
_EXAMPLES: Mapping[Any, str] = {int: "200", float: "0.5", bool: "true"}


@dataclass(frozen=True)
class RewardFunction:
    """Reward function bound to its arguments, called by the names of its parameters.

    given: parameter that a call gives -> whether the function cannot do without it. positional: the ones that it takes
    by position only. further: names that it takes by `**`; None for all. shipped: its fields are text, as the dataset
    stores them. needs_ground_truth: it fails for a row without one. takes_batch: it is called once for all samples.
    """

    function: Callable[..., Any]
    args: Mapping[str, Any]
    given: Mapping[str, bool]
    positional: Sequence[str] = ()
    further: Collection[str] | None = ()
    shipped: bool = False
    needs_ground_truth: bool = False
    takes_batch: bool = False

    @property
    def of_verl(self) -> bool:
        """True for verl's form for a batch."""
        return not self.given.keys().isdisjoint(VERL_BATCH)

    @property
    def takes_ids(self) -> bool:
        """True if a call gives token ids."""
        all_of_trl = self.takes_batch and self.further is None and not self.of_verl
        return all_of_trl or not self.given.keys().isdisjoint(IDS)

    def __call__(
        self,
        prompt: str,
        completion: str,
        fields: Mapping[str, str],
        prompt_ids: Sequence[int] | None = None,
        completion_ids: Sequence[int] | None = None,
        objects: Mapping[str, Any] = MappingProxyType({}),
    ) -> Any:
        """Score one sample."""
        values = sample_arguments(Sample(prompt, completion, fields, prompt_ids, completion_ids, objects))
        values["fields"] = MappingProxyType(fields if self.shipped else values["fields"])
        return finished(self._call(values))

    def begin_batch(self, samples: Sequence[Sample], steps: Steps, logged: Logged) -> Any:
        """Call a batch function once for all samples; the result may be awaitable."""
        values = verl_arguments(samples) if self.of_verl else trl_arguments(samples, steps, logged)
        for name in (name for name, needed in self.given.items() if needed and name not in values):
            columns = ", ".join(key for key in values if key not in TRL_BATCH)
            known = "token ids are not known here" if name in IDS else f"the rows have {columns or 'no column'}"
            raise ValueError(f"its parameter {name} is not there: {known}")
        return self._call(values)

    def of_batch(self, samples: Sequence[Sample], steps: Steps | None = None, logged: Logged | None = None) -> Any:
        """Score samples by one call of a batch function."""
        return finished(self.begin_batch(samples, steps or Steps(), logged or Logged(len(samples))))

    def _call(self, values: Mapping[str, Any]) -> Any:
        names = [name for name, needed in self.given.items() if needed or name in values]
        if self.further != ():
            names += [name for name in values if self.further is None or name in self.further]
        named = {**{name: values[name] for name in names}, **self.args}
        first = [named.pop(name) for name in self.positional]
        return self.function(*first, **named)


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
    return bind(load_function("reward", target), name, args, shipped=target in SHIPPED.values())


def bind(
    function: Callable[..., Any], name: str, args: Mapping[str, Any] | None = None, shipped: bool = False
) -> RewardFunction:
    """Bind a function, called `name` in messages, to `args`; raises as `resolve`."""
    args = dict(args or {})
    try:
        every = inspect.signature(function).parameters.values()
    except ValueError:  # of some functions written in C
        _refuse(name, f"its parameters cannot be read, and {ACCEPTED}")
    named = {one.name: one for one in every if one.kind not in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)}
    open_ended = any(one.kind is Parameter.VAR_KEYWORD for one in every)
    takes_batch = not named.keys().isdisjoint((*TRL_BATCH, *VERL_BATCH))
    of_verl = not named.keys().isdisjoint(VERL_BATCH if takes_batch else ("data_source", "solution_str", "extra_info"))
    known = (VERL_BATCH if of_verl else TRL_BATCH) if takes_batch else OF_SAMPLE
    _check(name, named, args, known, open_ended, columns=takes_batch and not of_verl)
    given = {key: one.default is Parameter.empty for key, one in named.items() if key not in args}
    if not takes_batch or of_verl:
        given = {key: needed for key, needed in given.items() if key in known}
    further: Collection[str] | None = (None if takes_batch else VERL_SAMPLE if of_verl else ()) if open_ended else ()
    compares = any(given.get(key, False) for key in ("ground_truth", "ground_truths"))
    return RewardFunction(
        function,
        args,
        given,
        positional=[key for key, one in named.items() if one.kind is Parameter.POSITIONAL_ONLY],
        further=further,
        shipped=shipped,
        needs_ground_truth=name in COMPARING if shipped else compares,
        takes_batch=takes_batch,
    )


def _check(
    name: str,
    named: Mapping[str, Parameter],
    args: Mapping[str, Any],
    known: Collection[str],
    open_ended: bool,
    columns: bool,
) -> None:
    """Refuse parameters that no call gives, and arguments that are none.

    known: names that calls of its form give; with `columns`, any further name is a column.
    """
    if absent := [key for key in named if key in NOT_GIVEN and key not in args]:
        _refuse(name, f"the function takes {absent[0]}, which is not given here; {ACCEPTED}")
    if unknown := [key for key in args if key not in named and not open_ended]:
        _refuse(name, f"the function has no parameter {unknown[0]!r}; take it out of args")
    if twice := [key for key in args if key in known]:
        _refuse(name, f"args has {twice[0]!r}, which each call gives; take it out of args")
    others = {*OF_SAMPLE, *TRL_BATCH, *VERL_BATCH} - {*known, *(COLUMNS if columns else ())}
    if mixed := [key for key in named if key in others]:
        _refuse(name, f"the function takes {mixed[0]} beside {next(key for key in named if key in known)}; {ACCEPTED}")
    for key, one in named.items():
        if not (columns or key in known or key in args) and one.default is Parameter.empty:
            example = f"args: {{{key}: {_EXAMPLES.get(one.annotation, '...')}}}"
            more = "" if named.keys() & known else f"; {ACCEPTED}"
            column = "" if more else f", or take a column as fields[{key!r}]"
            _refuse(name, f"no call gives the function's parameter {key!r}; give it by {example}{column}{more}")
    if not named.keys() & known:
        _refuse(name, f"the function's parameters are {', '.join(named) or 'none'}, and {ACCEPTED}")


def _refuse(name: str, problem: str) -> NoReturn:
    raise UserError(f"reward {name!r}: {problem}.")
