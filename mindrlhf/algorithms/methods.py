"""Methods of one kind by name, and their options.

A method is a function. It registers itself with a decorator, or is a user's `file.py:function`. Its keyword-only
parameters are its options: the settings, their checks and the documentation are made from these signatures.
"""

import difflib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Generic, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, ValidationError, create_model

from mindrlhf.errors import UserError
from mindrlhf.user_functions import is_user_function, load_function


@dataclass(frozen=True)
class Setting:
    """Presentation of an option in the settings, as metadata of its annotation.

    description: one sentence, with the names of verl and TRL. name: the key in the settings where it differs.
    """

    description: str
    name: str | None = None


@dataclass(frozen=True)
class Option:
    """Option of a method.

    setting: its key in the settings; None for an option that settings do not offer.
    """

    name: str
    annotation: Any
    default: Any
    setting: str | None
    description: str


@dataclass(frozen=True)
class Method:
    """Named function with options. what: its kind, for messages (`policy loss`)."""

    what: str
    name: str
    function: Callable

    @property
    def options(self) -> dict[str, Option]:
        """Options of the function, by name."""
        return options_of(self.function)

    def checked(self, given: Mapping[str, Any] | None) -> dict[str, Any]:
        """Convert the given options to the declared types.

        Raises UserError for an option that the method does not take, or a value that its annotation refuses.
        """
        given = given or {}
        for name in given:
            if name not in self.options:
                raise unknown_name(f"option of {self.what} {self.name}", name, self.options)
        try:
            checked = _options_model(self.function)(**given)
        except ValidationError as error:
            first = error.errors()[0]
            option = self.options[first["loc"][0]]
            key = f" (algorithm.{option.setting})" if option.setting not in (None, option.name) else ""
            raise UserError(
                f"Option {option.name}{key} of {self.what} {self.name} is {first['input']!r}: {first['msg']}."
            ) from None
        return {name: getattr(checked, name) for name in given}


Kind = TypeVar("Kind", bound=Method)


class Methods(Mapping[str, Kind], Generic[Kind]):
    """All methods of one kind: name -> method, in the order of registration.

    what: the kind in words. kind: the class of its entries, whose further fields are the decorator's arguments.
    """

    def __init__(self, what: str, kind: type[Kind]):
        self.what, self._kind = what, kind
        self._methods: dict[str, Kind] = {}

    def register(self, **traits: Any) -> Callable[[Callable], Callable]:
        """Return the decorator that adds a function under its own name."""

        def add(function: Callable) -> Callable:
            self._methods[function.__name__] = self._kind(self.what, function.__name__, function, **traits)
            return function

        return add

    def find(self, name: str) -> Kind:
        """Return the method called `name`, or a user's `file.py:function`.

        A user's function without a decorator has no traits. Raises UserError where no method has the name.
        """
        if name in self._methods:
            return self._methods[name]
        if not is_user_function(name):
            raise unknown_name(self.what, name, self)
        function = load_function(self.what, name)
        registered = self._methods.get(function.__name__)
        if registered is not None and registered.function is function:
            return registered
        return self._kind(self.what, name, function)

    def offered(self) -> dict[str, dict[str, Option]]:
        """Collect all options in the settings: setting -> method name -> option."""
        settings: dict[str, dict[str, Option]] = {}
        for name, method in self._methods.items():
            for option in method.options.values():
                if option.setting:
                    settings.setdefault(option.setting, {})[name] = option
        return settings

    def __getitem__(self, name: str) -> Kind:
        return self._methods[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._methods)

    def __len__(self) -> int:
        return len(self._methods)


def unknown_name(what: str, name: str, known: Iterable[str]) -> UserError:
    """Make the error for an unknown method: nearest name first, then all.

    what: the kind of method (`policy loss`, `advantage`, ...).
    """
    known = sorted(known)
    if not known:
        return UserError(f"Unknown {what} {name!r}: there are none.")
    nearest = difflib.get_close_matches(str(name), known, n=1, cutoff=0.5)
    hint = f"did you mean {nearest[0]!r}? Known" if nearest else "known"
    return UserError(f"Unknown {what} {name!r}: {hint} are {', '.join(known)}.")


def options_of(function: Callable) -> dict[str, Option]:
    """Read the keyword-only parameters of a function as options, by name."""
    found = {}
    for item in inspect.signature(function).parameters.values():
        if item.kind is inspect.Parameter.KEYWORD_ONLY:
            shown = next((one for one in get_args(item.annotation) if isinstance(one, Setting)), None)
            setting = (shown.name or item.name) if shown else None
            description = shown.description if shown else ""
            found[item.name] = Option(item.name, item.annotation, item.default, setting, description)
    return found


@cache
def _options_model(function: Callable) -> type[BaseModel]:
    declared = {name: (option.annotation, option.default) for name, option in options_of(function).items()}
    return create_model("Options", __config__=ConfigDict(allow_inf_nan=False), **declared)
