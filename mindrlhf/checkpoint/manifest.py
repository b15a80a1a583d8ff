"""`manifest.json`: size and checksum of every file of a training checkpoint.

A checkpoint is whole if and only if its manifest exists and agrees with the files: the manifest is written last, and
the folder gets its final name after that.
"""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, BinaryIO

from pydantic import AfterValidator, Field, StrictInt, StrictStr, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from mindrlhf.errors import UserError
from mindrlhf.files.atomic import stays_below, sync
from mindrlhf.files.json import read_json, write_json
from mindrlhf.files.naming import step_of
from mindrlhf.files.text import reading

MANIFEST_FILE = "manifest.json"
FORMAT = "mindrlhf training checkpoint"
VERSION = 1


def _inside(name: str) -> str:
    if not stays_below(name):
        raise ValueError("not a path inside of its folder")
    return name


@dataclass(frozen=True)
class StoredFile:
    """One file: its size and its SHA-256 in hexadecimal digits."""

    bytes: StrictInt
    sha256: StrictStr


@dataclass(frozen=True)
class Manifest:
    """List of the files of a checkpoint, or of one rank's part of it.

    step: steps done. files: path below the checkpoint -> file.
    """

    step: Annotated[StrictInt, Field(ge=0)]
    files: dict[Annotated[str, AfterValidator(_inside)], StoredFile]

    def write(self, folder: Path, durable: bool = True) -> None:
        """Write the manifest into the folder, complete or not at all.

        durable: wait for the disk.
        """
        files = {name: asdict(file) for name, file in sorted(self.files.items())}
        content = {"format": FORMAT, "version": VERSION, "step": self.step, "files": files}
        unfinished = folder / f".{MANIFEST_FILE}"
        write_json(unfinished, {**content, "sha256": _digest(content)})
        if durable:
            sync(unfinished)
        os.replace(unfinished, folder / MANIFEST_FILE)

    @classmethod
    def read(cls, folder: Path) -> "Manifest":
        """Read a manifest; a UserError if it is missing, damaged or another step's."""
        path = folder / MANIFEST_FILE
        if not path.exists():
            raise UserError(f"{folder}: is no whole checkpoint (no {MANIFEST_FILE}); give a step_N folder of a run.")
        content = read_json(path)
        if content.get("format") != FORMAT:
            raise UserError(f"{path}: is not the manifest of a training checkpoint; give a step_N folder of a run.")
        if content.pop("sha256", None) != _digest(content):
            raise UserError(f"{path}: is damaged (its checksum does not fit its content); use an earlier checkpoint.")
        version = content.get("version")
        if version != VERSION:
            raise UserError(f"{path}: was written in version {version} of the format; use one of version {VERSION}.")
        try:
            manifest = TypeAdapter(cls).validate_python({key: content.get(key) for key in ("step", "files")})
        except ValidationError as error:
            (found, *_) = error.errors()
            place = ".".join(map(str, found["loc"]))
            raise UserError(f"{path}: {place}: {found['msg']}; use an earlier checkpoint.") from None
        if step_of(folder) not in (None, manifest.step):
            raise UserError(f"{folder}: holds the checkpoint of step {manifest.step}; give the folder its name back.")
        return manifest

    def verify(self, folder: Path, names: Sequence[str]) -> None:
        """Compare files with the manifest; a UserError names one that differs."""
        for path in (folder / name for name in names):
            with reading(path):
                found = describe(path)
            if found != self.files[path.relative_to(folder).as_posix()]:
                raise UserError(f"{path}: is damaged (its checksum has changed); use an earlier checkpoint.")


def describe(path: Path) -> StoredFile:
    with path.open("rb") as file:
        digest = file_digest(file)
        return StoredFile(file.tell(), digest)


def file_digest(file: BinaryIO) -> str:
    """Compute an open file's SHA-256 in hexadecimal digits (Python 3.10's hashlib has no function)."""
    digest = hashlib.sha256()
    while chunk := file.read(1 << 20):
        digest.update(chunk)
    return digest.hexdigest()


def step_folders(folder: Path) -> list[Path]:
    """List the checkpoints in a folder, whole or not, the newest first."""
    with reading(folder), suppress(FileNotFoundError, NotADirectoryError):
        found = [path for path in folder.iterdir() if step_of(path) is not None and path.is_dir()]
        return sorted(found, key=step_of, reverse=True)
    return []


def _digest(content: Mapping[str, Any]) -> str:
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()
