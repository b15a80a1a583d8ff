"""Methods of one kind by name, and their options.

A method is a function that registers itself with a decorator, or a user's `file.py:function`. Its keyword-only
parameters are its options: the settings, their checks and the documentation are made from these signatures.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from inspect import Parameter
from typing import Any, Generic, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError, create_model

from mindrlhf.errors import UserError
from mindrlhf.files.text import nearest, some
from mindrlhf.user_functions import is_user_function, load_function

MOST_NAMES = 12  # in a message
# Options that the settings offer -> a sentence with verl's and TRL's names.
DESCRIPTIONS: Mapping[str, str] = yaml.safe_load((resources.files(__package__) / "options.yaml").read_text("utf-8"))


@dataclass(frozen=True)
class Method:
    """Named function with options. what: its kind, for messages (`policy loss`)."""

    what: str
    name: str
    function: Callable

    @property
    def options(self) -> dict[str, Parameter]:
        """Keyword-only parameters of the function, by name."""
        parameters = inspect.signature(self.function).parameters
        return {name: item for name, item in parameters.items() if item.kind is Parameter.KEYWORD_ONLY}

    def checked(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Convert options to their declared types; UserError for an unknown or wrong one."""
        for name in given:
            if name not in self.options:
                raise unknown_name(f"option of {self.what} {self.name}", name, self.options)
        try:
            checked = _options_model(self)(**given)
        except ValidationError as error:
            first = error.errors()[0]
            raise UserError(
                f"Option {first['loc'][0]} of {self.what} {self.name} is {first['input']!r}: {first['msg']}."
            ) from None
        return {name: getattr(checked, name) for name in given}


@cache
def _options_model(method: Method) -> type[BaseModel]:
    declared: dict[str, Any] = {name: (option.annotation, option.default) for name, option in method.options.items()}
    return create_model("Options", __config__=ConfigDict(allow_inf_nan=False), **declared)


Kind = TypeVar("Kind", bound=Method)


class Methods(dict[str, Kind], Generic[Kind]):
    """Methods of one kind by name, in the order of registration.

    what: the kind in words. kind: the class of its entries, whose further fields are the decorator's arguments.
    elsewhere: other suites' names -> ours, in words.
    """

    def __init__(self, what: str, kind: type[Kind], elsewhere: Mapping[str, str] | None = None):
        super().__init__()
        self.what = what
        self._kind = kind
        self.elsewhere = elsewhere or {}

    def register(self, **traits: Any) -> Callable[[Callable], Callable]:
        """Return the decorator that adds a function under its own name."""

        def add(function: Callable) -> Callable:
            self[function.__name__] = self._kind(self.what, function.__name__, function, **traits)
            return function

        return add

    def find(self, name: str) -> Kind:
        """Return a method, or a user's `file.py:function`, without traits if not registered."""
        if name in self:
            return self[name]
        if name in self.elsewhere:
            raise UserError(f"Unknown {self.what} {name!r}: it is {self.elsewhere[name]} here.")
        if not is_user_function(name):
            raise unknown_name(self.what, name, self)
        function = load_function(self.what, name)
        registered = self.get(function.__name__)
        return registered if registered and registered.function is function else self._kind(self.what, name, function)

    def offered(self) -> dict[str, dict[str, Parameter]]:
        """Collect the options that the settings offer: option -> method name -> option."""
        taken = {name for method in self.values() for name in method.options}
        return {
            name: {method.name: method.options[name] for method in self.values() if name in method.options}
            for name in DESCRIPTIONS
            if name in taken
        }


def unknown_name(what: str, name: str, known: Iterable[str]) -> UserError:
    """Make the error for an unknown method of the kind `what`, nearest name first."""
    known = sorted(known)
    if not known:
        return UserError(f"Unknown {what} {name!r}: there are none.")
    near = nearest(name, known, cutoff=0.5)
    hint = f"did you mean {near!r}? Known" if near else "known"
    return UserError(f"Unknown {what} {name!r}: {hint} are {some(known, MOST_NAMES)}.")
