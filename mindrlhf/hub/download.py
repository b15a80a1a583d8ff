"""Downloads from Hugging Face's hub or ModelScope's.

ModelScope's package is not required, and this code has run only with a stand-in for it.
"""

import fcntl
import importlib
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal

from mindrlhf.errors import UserError
from mindrlhf.files.user_cache import user_cache

Kind = Literal["model", "dataset"]


def from_model_scope() -> bool:
    """Test that MODELSCOPE is 1 or true in the environment."""
    return os.environ.get("MODELSCOPE", "").lower() in ("1", "true")


def download(name: str, kind: Kind, patterns: Sequence[str], revision: str | None = None) -> Path:
    """Download the files that match; returns their folder in the cache.

    Files in the cache are not downloaded again, and all files come from the cache while the hub cannot be reached. One
    process of a host downloads at a time, so that the others find its files. Raises UserError.
    """
    with _alone():
        get = _model_scope if from_model_scope() else _hugging_face
        return get(name, kind, patterns, revision)


def list_files(name: str, revision: str | None = None) -> list[str] | None:
    """List a dataset's files.

    None if only a download shows them: while the hub cannot be reached, and on ModelScope.
    """
    if from_model_scope():
        return None
    from huggingface_hub import HfApi, errors

    try:
        files = HfApi().dataset_info(name, revision=revision).siblings
    except errors.RevisionNotFoundError:
        return []
    except Exception:  # from any HTTP client that the package has; the download that follows reports the problem
        return None
    return [file.rfilename for file in files or ()]


def fetch_command(name: str, kind: Kind) -> str:
    """Write the command that downloads a model or dataset."""
    if from_model_scope():
        return f"`modelscope download --{kind} {name}`"
    return f"`hf download {name}`" if kind == "model" else f"`hf download --repo-type dataset {name}`"


def _hugging_face(name: str, kind: Kind, patterns: Sequence[str], revision: str | None) -> Path:
    from huggingface_hub import constants, errors, snapshot_download

    hub = constants.ENDPOINT
    try:
        return Path(snapshot_download(name, repo_type=kind, revision=revision, allow_patterns=list(patterns)))
    except errors.GatedRepoError:
        right = f"accept its terms at {hub}/{name}, then log in with `hf auth login`"
        raise UserError(f"{name}: the {kind}'s owner gives it to known users only; {right}.") from None
    except errors.RepositoryNotFoundError:
        found = f"{name}: there is no such path here, and no {kind} of that name at {hub}"
        raise UserError(f"{found}; check the name, or log in with `hf auth login` if it is private.") from None
    except errors.LocalEntryNotFoundError:
        raise _unreachable(name, kind, f"{hub} cannot be reached") from None
    except Exception as error:  # of whichever HTTP client the package has
        raise _unreachable(name, kind, _reason(error)) from error


def _model_scope(name: str, kind: Kind, patterns: Sequence[str], revision: str | None) -> Path:
    try:
        package = importlib.import_module("modelscope")
    except ImportError:
        right = "install it with `pip install modelscope`, or unset MODELSCOPE to take Hugging Face's hub"
        raise UserError(f"{name}: MODELSCOPE is set, and its package is not installed; {right}.") from None
    try:
        wanted = {"revision": revision, "allow_patterns": list(patterns)}
        return Path(package.snapshot_download(name, repo_type=kind, **wanted))
    except Exception as error:  # its errors have no common class
        raise _unreachable(name, kind, _reason(error)) from error


def _unreachable(name: str, kind: Kind, reason: str) -> UserError:
    right = f"where there is a network, fetch it with {fetch_command(name, kind)}, or give a local path"
    return UserError(f"{name}: there is no such path here, nor in the hub's cache, and {reason}; {right}.")


def _reason(error: Exception) -> str:
    text = str(error).strip().splitlines() or [type(error).__name__]
    return f"the download failed ({text[0].rstrip('.')})"


@contextmanager
def _alone() -> Iterator[None]:
    """Wait until no other process of this user downloads."""
    with open(user_cache() / "downloads.lock", "wb") as file:
        with suppress(OSError):  # a file system without locks: the hubs' packages lock single files, too
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
