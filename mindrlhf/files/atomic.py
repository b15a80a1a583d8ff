"""Atomic writing of files and folders: complete under the final name, or absent.

The context managers yield a temporary path next to the final one, sync it to the disk and rename it. An error leaves
earlier content unchanged; an `OSError` about the destination becomes a `UserError`. A link in place of the final name
is replaced, and what it points to stays. A killed process leaves its hidden `.NAME.XXXXXXXX.tmp` behind, which `clean`
removes.
"""

import errno
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath

from mindrlhf.errors import UserError

_ADVICE = {
    errno.ENOSPC: "free some space or choose another disk",
    errno.EDQUOT: "free some of your quota or choose another disk",
    errno.EFBIG: "raise the file size limit (ulimit -f) or choose another disk",
    errno.EACCES: "choose a place that you may write to",
    errno.EPERM: "choose a place that you may write to",
    errno.EROFS: "choose a place that is not read-only",
}

_LEFTOVER = re.compile(r"\.(?P<name>.+)\.[0-9a-f]{8}\.(?:tmp(?:\.[^.]+)?|(?P<old>old))")


@contextmanager
def atomic_file(path: str | Path, durable: bool = True) -> Iterator[Path]:
    """Yield a temporary path, renamed to `path` when the body succeeds.

    An existing file is replaced. durable: wait for the disk, so that the file also survives a power cut.
    """
    target = _place(path)
    with _temporary(target, target) as temporary:
        _refuse_folder(target)
        target.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        if durable:
            sync(temporary)
        os.replace(temporary, target)
        if durable:
            sync_folder(target.parent)


@contextmanager
def atomic_files(folder: str | Path) -> Iterator[Path]:
    """Yield a temporary folder; its files move into `folder` when the body succeeds.

    Each rename is atomic; several files together are not, so a power cut between two renames can leave some of them
    new and some old.
    """
    folder = Path(folder).resolve()
    with _temporary(folder, folder / "files") as temporary:
        folder.mkdir(parents=True, exist_ok=True)
        temporary.mkdir()
        yield temporary
        files = sorted(temporary.iterdir())
        for file in files:
            _refuse_folder(folder / file.name)
            sync(file)
        for file in files:
            os.replace(file, folder / file.name)
        sync_folder(folder)


@contextmanager
def atomic_folder(path: str | Path, replace: bool = False) -> Iterator[Path]:
    """Yield a temporary folder, renamed to `path` when the body succeeds.

    An existing folder that is not empty is refused, or with `replace` exchanged as a whole; between the two renames of
    that exchange the earlier folder is called `.NAME.XXXXXXXX.old`.
    """
    target = _place(path)
    with _temporary(target, target) as temporary:
        if target.exists() and not target.is_dir():
            raise UserError(f"{target}: is a file, and a folder is to be written there; give another name.")
        if target.exists() and target in (Path.cwd(), *Path.cwd().parents):
            raise UserError(f"{target}: the current folder cannot be replaced; give the name of a folder inside it.")
        if not replace and target.exists() and any(target.iterdir()):
            raise UserError(f"{target}: the folder exists and is not empty; remove it or give another name.")
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary.mkdir()
        yield temporary
        for folder, _, files in os.walk(temporary):
            for name in files:
                sync(Path(folder, name))
            sync_folder(Path(folder))
        put_in_place(temporary, target)


@contextmanager
def _temporary(target: Path, name: Path) -> Iterator[Path]:
    """Yield the temporary name of `name`, explain errors, remove leftovers."""
    temporary = temporary_name(name)
    try:
        yield temporary
    except OSError as error:
        raise explained(error, target, temporary) from error
    finally:
        with suppress(OSError):
            _remove(temporary)


def _place(path: str | Path) -> Path:
    """Resolve a path, but for a link as its last part."""
    path = Path(path)
    return path.resolve() if path.name in ("", "..") else path.parent.resolve() / path.name


def _refuse_folder(target: Path) -> None:
    if target.is_dir():
        raise UserError(f"{target}: is a folder, and a file is to be written there; give a file name.")


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def clean(folder: str | Path) -> None:
    """Remove the leftovers of killed processes in `folder`, where no other process is writing.

    A folder gets its name back if it was moved aside for a new one that never took its place.
    """
    folder = Path(folder)
    try:
        for path in sorted(folder.iterdir()) if folder.is_dir() else ():
            leftover = _LEFTOVER.fullmatch(path.name)
            if leftover and leftover["old"] and not (folder / leftover["name"]).exists():
                os.rename(path, folder / leftover["name"])
            elif leftover:
                _remove(path)
    except OSError as error:
        raise UserError(f"{error.filename}: cannot be removed ({error.strerror}); remove this leftover.") from error


def remove_folder(path: Path) -> None:
    """Remove a folder; its name never belongs to only a part of it."""
    doomed = temporary_name(path)
    with suppress(FileNotFoundError):
        os.rename(path, doomed)
        shutil.rmtree(doomed)


def temporary_name(target: Path, token: str | None = None) -> Path:
    """Make the name of the hidden sibling that `target` is written as.

    token: 8 hexadecimal digits that several processes writing one folder have agreed on; random if None.
    """
    return target.with_name(f".{target.stem}.{token or secrets.token_hex(4)}.tmp{target.suffix}")


def put_in_place(temporary: Path, target: Path) -> None:
    """Rename a complete folder to its final name, durably; an existing folder is exchanged."""
    earlier = target.with_name(f".{target.name}.{secrets.token_hex(4)}.old")
    # An empty folder is replaced in one step.
    exchanged = target.is_symlink() or (target.exists() and any(target.iterdir()))
    if exchanged:
        os.rename(target, earlier)
    try:
        os.rename(temporary, target)
    except OSError:
        if exchanged:
            os.rename(earlier, target)
        raise
    sync_folder(target.parent)
    with suppress(OSError):
        _remove(earlier)


def sync(path: Path) -> None:
    """Sync a file to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_folder(path: Path) -> None:
    with suppress(OSError):  # some network file systems have no fsync of a folder
        sync(path)


def explained(error: OSError, target: Path, temporary: Path) -> Exception:
    """Turn errors about writing `target` as `temporary` into a `UserError`; keep others."""
    about = None if error.filename is None else Path(os.fsdecode(error.filename))
    if about is not None and about not in (target, *target.parents) and temporary not in (about, *about.parents):
        return error
    reason = error.strerror or str(error)
    advice = _ADVICE.get(error.errno, "check the path")
    return UserError(f"{target}: cannot be written ({reason}), and nothing was changed there; {advice}.")


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn errors about writing a file, or files in a folder, into a `UserError`."""
    try:
        yield
    except OSError as error:
        advice = _ADVICE.get(error.errno, "check the path")
        raise UserError(f"{path}: cannot be written ({error.strerror or error}); {advice}.") from error


def make_folder(folder: Path) -> None:
    """Create `folder` with its parents; a UserError says why it fails."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot create the folder {folder} ({error.strerror}): give one that can be written") from None


def stays_below(name: str) -> bool:
    """Test that a relative path in a file stays inside its folder."""
    path = PurePosixPath(name)
    return bool(path.parts) and not path.is_absolute() and ".." not in path.parts and "\0" not in name
