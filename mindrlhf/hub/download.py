"""Downloads from Hugging Face's hub or ModelScope's.

ModelScope's package is not required, and this code has run only with a stand-in for it.
"""

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from threading import Timer
from typing import IO, Any, Literal, cast

from mindrlhf.errors import UserError
from mindrlhf.hub import fetch

Kind = Literal["model", "dataset"]

PATIENCE_S = 5.0  # until a line says that a hub is silent
SILENCE_S = 20.0  # of a connection, after which a hub counts as unreachable


def from_model_scope() -> bool:
    """Test that MODELSCOPE is 1 or true in the environment."""
    return os.environ.get("MODELSCOPE", "").lower() in ("1", "true")


def download(name: str, kind: Kind, patterns: Sequence[str], revision: str | None = None) -> Path:
    """Download the files that match; returns their folder in the cache.

    Files in the cache are not downloaded again, and all files come from the cache while the hub cannot be reached.
    Processes may download at once: the hubs' packages lock single files. Raises UserError.
    """
    get = _model_scope if from_model_scope() else _hugging_face
    return get(name, kind, patterns, revision)


def list_files(name: str, revision: str | None = None) -> list[str] | None:
    """List a dataset's files.

    None if only a download shows them: while the hub cannot be reached, and on ModelScope.
    """
    if from_model_scope():
        return None
    answer = _ask(name, "dataset", None, revision)
    return [] if answer.get("error") == "revision" else answer.get("files")  # the download reports other problems


def fetch_command(name: str, kind: Kind) -> str:
    """Write the command that downloads a model or dataset."""
    if from_model_scope():
        return f"`modelscope download --{kind} {name}`"
    return f"`hf download {name}`" if kind == "model" else f"`hf download --repo-type dataset {name}`"


def _hugging_face(name: str, kind: Kind, patterns: Sequence[str], revision: str | None) -> Path:
    answer = _ask(name, kind, patterns, revision)
    if "folder" in answer:
        return Path(answer["folder"])
    hub = answer["hub"]
    if answer["error"] == "gated":
        right = f"accept its terms at {hub}/{name}, then log in with `hf auth login`"
        raise UserError(f"{name}: the {kind}'s owner gives it to known users only; {right}.")
    if answer["error"] == "missing":
        found = f"{name}: there is no such path here, and no {kind} of that name at {hub}"
        raise UserError(f"{found}; check the name, or log in with `hf auth login` if it is private.")
    unreachable = answer["error"] == "unreachable"
    raise _unreachable(name, kind, f"{hub} cannot be reached" if unreachable else _failed(answer["reason"]))


def _ask(name: str, kind: Kind, patterns: Sequence[str] | None, revision: str | None) -> dict[str, Any]:
    """Send a request to the hub from a process that runs `fetch.py`."""
    request = {"name": name, "kind": kind, "revision": revision, "patterns": patterns, "seconds": SILENCE_S}
    command = [sys.executable, fetch.__file__]
    with subprocess.Popen(command, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        waiting = Timer(PATIENCE_S, _say_silent, (name,))
        waiting.daemon = True
        waiting.start()
        asked = cast(IO[str], process.stdin)
        answers = cast(IO[str], process.stdout)
        try:
            asked.write(json.dumps(request) + "\n")
            asked.flush()
            lines = []
            for line in answers:
                waiting.cancel()
                lines.append(line)
        finally:
            waiting.cancel()
            process.kill()
    if not lines:
        raise UserError(f"{name}: the process that asks the hub has ended without an answer; try again.")
    return json.loads(lines[-1]) or {"error": "failed", "hub": "the hub", "reason": "its process has ended"}


def _say_silent(name: str) -> None:
    waited = f"{name}: the hub has not answered for {PATIENCE_S:g} s"
    print(f"{waited}; it is waited for up to {SILENCE_S:g} s", file=sys.stderr, flush=True)


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
        raise _unreachable(name, kind, _failed(str(error) or type(error).__name__)) from error


def _unreachable(name: str, kind: Kind, reason: str) -> UserError:
    right = f"where there is a network, fetch it with {fetch_command(name, kind)}, or give a local path"
    return UserError(f"{name}: there is no such path here, nor in the hub's cache, and {reason}; {right}.")


def _failed(reason: str) -> str:
    return f"the download failed ({reason.strip().splitlines()[0].rstrip('.')})"
