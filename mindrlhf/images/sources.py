"""Images as rows have them: paths, bytes, base64, groups of `datasets`, Pillow's objects."""

import base64
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from mindrlhf.configs.problems import brief
from mindrlhf.errors import UserError
from mindrlhf.files.text import reading
from mindrlhf.images.decode import MOST_FILE_BYTES, decode_image, image_array

BYTES = "bytes"
PATH = "path"
"""Keys of an image in rows of `datasets`."""

MOST_PATH = 4096
"""Characters of a path; longer text is base64."""
LEAST_BASE64 = 44
"""Characters of the base64 of an image; shorter text is a path."""
MOST_BASE64 = 2 * MOST_FILE_BYTES
DATA_URI = "data:"
FILE_URI = "file://"
WEB = ("http://", "https://")
KINDS = f"a path, the file's bytes, base64 text, or a group with {BYTES!r} or {PATH!r}"


def read_image(source: Any, folder: str | Path, where: str) -> np.ndarray:
    """Read an image of a row to uint8[H, W, 3].

    source: a path, from `folder` on unless it is absolute; bytes of a file; base64 text of them, plain or as a data
        URI; a mapping with `bytes` or `path`, of which bytes come first; a Pillow image.
    where: the row's file and place, for messages. Raises UserError.
    """
    if isinstance(source, Image.Image):
        return image_array(source, where)
    if isinstance(source, Mapping):
        source = _of_group(source, where)
    if isinstance(source, bytes | bytearray | memoryview):
        return decode_image(bytes(source), where)
    if isinstance(source, Path):
        return _read_file(Path(folder, source), where)
    if not isinstance(source, str) or not source:
        raise UserError(f"{where}: the image is {brief(source)}, and must be {KINDS}.")
    return _of_text(source, folder, where)


def _of_group(group: Mapping[str, Any], where: str) -> Any:
    """Return the bytes of an image's group, or its path."""
    unknown = next((key for key in group if key not in (BYTES, PATH)), None)
    if unknown is not None:
        raise UserError(f"{where}: the image has the key {brief(unknown)}, and its keys are {BYTES!r} and {PATH!r}.")
    found = group.get(PATH) if group.get(BYTES) is None else group[BYTES]
    if found is None:
        raise UserError(f"{where}: the image has neither {BYTES!r} nor {PATH!r}.")
    return found


def _of_text(text: str, folder: str | Path, where: str) -> np.ndarray:
    """Read an image that is given as text."""
    if text.startswith(WEB):
        raise UserError(f"{where}: the image is the address {brief(text)}; download it, and give the file's path.")
    if text.startswith(DATA_URI):
        head, comma, body = text.partition(",")
        if not comma or not head.endswith(";base64"):
            raise UserError(f"{where}: the data URI {brief(text)} has no base64; write data:image/png;base64, first.")
        return decode_image(_of_base64(body, where), where)
    path = Path(folder, text.removeprefix(FILE_URI)) if len(text) <= MOST_PATH else None
    short = len(text) < LEAST_BASE64
    if path and (short or path.suffix or text.startswith(FILE_URI) or _is_file(path)):  # base64 has no full stop
        return _read_file(path, where)
    return decode_image(_of_base64(text, where), where)


def _of_base64(text: str, where: str) -> bytes:
    if len(text) > MOST_BASE64:
        raise UserError(f"{where}: the image has {len(text)} characters of base64; give at most {MOST_BASE64}.")
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except ValueError:
        raise UserError(f"{where}: the image {brief(text)} is no file's path and no base64; give {KINDS}.") from None


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # a name that no file can have
        return False


def _read_file(path: Path, where: str) -> np.ndarray:
    """Read an image file; its path is added to messages."""
    if not _is_file(path):
        right = "paths are relative to the data file, or without one to the working directory"
        raise UserError(f"{where}: there is no image file {path}; {right}.")
    where = f"{where}: {path}"
    with reading(path):
        size = path.stat().st_size
        content = path.read_bytes() if 0 < size <= MOST_FILE_BYTES else b""
    if not content:
        raise UserError(f"{where}: the image's file has {size} bytes; give one of 1 to {MOST_FILE_BYTES} bytes.")
    return decode_image(content, where)
