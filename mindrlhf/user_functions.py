"""User functions named in settings: `path/file.py:function` or `package.module:function`."""

import importlib
import importlib.util
import sys
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType

from mindrlhf.errors import UserError
from mindrlhf.files.shipped import shipped_file
from mindrlhf.files.text import nearest

_loading: list[str] = []


def is_user_function(name: str) -> bool:
    """Test that a name has the form `place:function`."""
    place, _, function = name.rpartition(":")
    return bool(place and function)


def load_function(what: str, name: str) -> Callable:
    """Import the function called `name`; file paths are relative to the working directory.

    what: its kind, for messages, such as `reward`. Raises UserError if there is no such file, module or function, and
    when the import fails.
    """
    place, _, function_name = name.rpartition(":")
    what = f"{what} {name!r}"
    module = _load_module(what, place)
    function = getattr(module, function_name, None)
    if function is None:
        functions = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise UserError(f"{what}: {place} has no {function_name!r}{hint(function_name, functions)}.")
    if not callable(function):
        raise UserError(f"{what}: {function_name!r} in {place} is not a function, but {type(function).__name__}.")
    return function


def loading() -> str | None:
    """Return the file that is being imported for its functions, if any."""
    return _loading[-1] if _loading else None


def absolute(name: str) -> str:
    """Make the path in `path/file.py:function` absolute; keep other names."""
    place, colon, function_name = name.rpartition(":")
    return f"{_file(place)}:{function_name}" if colon and place.endswith(".py") else name


def hint(name: str, known: Iterable[str]) -> str:
    """Format ` (nearest: 'known')` for a message; empty if no name is near."""
    return f" (nearest: {near!r})" if (near := nearest(name, known)) else ""


def _file(place: str) -> Path:
    return shipped_file(Path(place)).absolute()


def _load_module(what: str, place: str) -> ModuleType:
    path = _file(place)
    if place.endswith(".py") and not path.is_file():
        raise UserError(f"{what}: there is no file {path}.")
    try:
        return _load_file(path) if place.endswith(".py") else importlib.import_module(place)
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        if isinstance(error, ModuleNotFoundError) and error.name and f"{place}.".startswith(f"{error.name}."):
            raise UserError(f"{what}: there is no module {error.name!r} on the Python path.") from None
        at = error if isinstance(error, SyntaxError) else traceback.extract_tb(error.__traceback__)[-1]
        raise UserError(
            f"{what}: importing {place} fails with {type(error).__name__}: {error} ({at.filename}, line {at.lineno})."
        ) from None


def _load_file(path: Path) -> ModuleType:
    name = str(path)  # no dotted name can be the same
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))  # so that it can import modules of its folder
    _loading.append(name)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    finally:
        _loading.pop()
    return module
