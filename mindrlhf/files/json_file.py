"""JSON objects in files, with messages that name the file."""

import json
from pathlib import Path, PurePosixPath
from typing import Any

from mindrlhf.errors import UserError
from mindrlhf.files.json_text import parse_json


def read_json(path: Path) -> dict[str, Any]:
    """Read the JSON object in a UTF-8 file.

    Raises `UserError` when it is missing, unreadable or not an object.
    """
    try:
        content = parse_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path}: the file does not exist.") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}).") from error
    except ValueError as error:
        raise UserError(f"{path}: is not valid JSON ({error}).") from error
    if not isinstance(content, dict):
        raise UserError(f"{path}: a JSON object is needed, and this is a {type(content).__name__}.")
    return content


def stays_below(name: str) -> bool:
    """Test that a relative path in a file stays inside its folder."""
    path = PurePosixPath(name)
    return bool(path.parts) and not path.is_absolute() and ".." not in path.parts and "\0" not in name


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write an object as indented UTF-8 JSON; not atomic by itself."""
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
