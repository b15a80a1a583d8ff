"""`manifest.json`: size and checksum of every file of a training checkpoint.

It also has a checksum of itself. A checkpoint is whole exactly when its manifest is there and agrees with the
files: it is written last, and the folder gets its final name after that.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindrlhf.errors import UserError
from mindrlhf.files.atomic import stays_below
from mindrlhf.files.json import read_json, write_json
from mindrlhf.files.naming import step_of

MANIFEST_FILE = "manifest.json"
FORMAT = "mindrlhf training checkpoint"
VERSION = 1


@dataclass(frozen=True)
class StoredFile:
    """One file: its size in bytes and its SHA-256 in hexadecimal digits."""

    size: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """List of a checkpoint's files.

    step: steps done. files: path below the folder -> file.
    """

    step: int
    files: Mapping[str, StoredFile]

    def write(self, folder: Path) -> None:
        """Write it into the folder; not atomic by itself."""
        files = {name: {"bytes": file.size, "sha256": file.sha256} for name, file in sorted(self.files.items())}
        content = {"format": FORMAT, "version": VERSION, "step": self.step, "files": files}
        write_json(folder / MANIFEST_FILE, {**content, "sha256": _digest(content)})

    @classmethod
    def read(cls, folder: Path) -> "Manifest":
        """Read the manifest of a checkpoint.

        Raises `UserError` for a manifest that is missing, damaged or another step's.
        """
        path = folder / MANIFEST_FILE
        if not path.exists():
            raise UserError(
                f"{folder}: is not a whole training checkpoint (it has no {MANIFEST_FILE}); give a step_N folder that "
                "a run has written."
            )
        content = read_json(path)
        if content.get("format") != FORMAT:
            raise UserError(f"{path}: is not the manifest of a training checkpoint; give a step_N folder of a run.")
        claimed = content.pop("sha256", None)
        if claimed != _digest(content):
            raise UserError(f"{path}: is damaged (its checksum does not fit its content); use an earlier checkpoint.")
        version = content.get("version")
        if version != VERSION:
            raise UserError(
                f"{path}: was written in version {version} of the format, and this suite reads {VERSION}; "
                "use the version of the suite that wrote it."
            )
        step = content.get("step")
        if type(step) is not int or step < 0:
            raise UserError(f"{path}: names no step ({step!r}); use an earlier checkpoint.")
        if step_of(folder) not in (None, step):
            raise UserError(f"{folder}: holds the checkpoint of step {step}; give the folder its own name back.")
        return cls(step, _stored_files(path, content.get("files")))

    def verify(self, folder: Path, names: Sequence[str]) -> None:
        """Compare the files `names` with the manifest.

        Raises `UserError`, naming the file, when one of them is missing or not as it was written.
        """
        for name in names:
            path, expected = folder / name, self.files[name]
            try:
                size = path.stat().st_size
                if size != expected.size:
                    state = f"has {size} bytes where {expected.size} were written"
                    raise UserError(f"{path}: is damaged (it {state}); use an earlier checkpoint.")
                if describe(path).sha256 != expected.sha256:
                    raise UserError(f"{path}: is damaged (its checksum has changed); use an earlier checkpoint.")
            except FileNotFoundError:
                raise UserError(f"{path}: is missing from the checkpoint; use an earlier checkpoint.") from None
            except OSError as error:
                raise UserError(f"{path}: cannot be read ({error.strerror}); use an earlier checkpoint.") from error


def _stored_files(path: Path, listed: Any) -> dict[str, StoredFile]:
    """Parse the file list of a manifest.

    Raises `UserError` for a file outside of its folder, and for anything but a list of files.
    """
    if not isinstance(listed, dict):
        raise UserError(f"{path}: lists no files; use an earlier checkpoint.")
    files = {}
    for name, file in listed.items():
        if not stays_below(name):
            raise UserError(f"{path}: lists {name!r}, which is not a path inside of its folder; do not use it.")
        size, digest = (file.get(key) for key in ("bytes", "sha256")) if isinstance(file, dict) else (None, None)
        if type(size) is not int or type(digest) is not str:
            raise UserError(f"{path}: says no size or checksum of {name}; use an earlier checkpoint.")
        files[name] = StoredFile(size, digest)
    return files


def describe(path: Path) -> StoredFile:
    """Compute size and checksum of a file as it is now."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return StoredFile(file.tell(), digest)


def step_folders(folder: Path) -> list[Path]:
    """List the checkpoints in a folder, whole or not, the newest first.

    Raises `UserError` when the folder cannot be read.
    """
    try:
        found = [path for path in folder.iterdir() if step_of(path) is not None and path.is_dir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise UserError(f"{folder}: cannot be read ({error.strerror}).") from error
    return sorted(found, key=step_of, reverse=True)


def _digest(content: Mapping[str, Any]) -> str:
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()
