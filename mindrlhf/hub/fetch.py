"""Requests to Hugging Face's hub in a separate process, safe from its servers.

Reads one line of JSON: {"name", "kind", "revision", "patterns", "seconds"}; null patterns ask for the list of files.
Writes a line {} once the hub has answered or cannot be reached, then {"folder"}, {"files"}, or {"error", "hub",
"reason"}. It is run by its path and imports nothing of the package. A connection that is silent for `seconds` fails,
and nothing is written outside of the hub's cache, whatever names the server's headers give to files and commits.
"""

import json
import os
import re
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from typing import Any

COMMIT = re.compile(r"[0-9a-f]{7,64}")
# Audit event -> places of the paths in its arguments that it changes.
WRITING = {"os.rename": (0, 1), "os.link": (1,), "os.symlink": (1,), "os.mkdir": (0,), "os.remove": (0,)}


class Outside(Exception):
    """A path outside of the cache that a server wants to be written."""


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # progress bars of the library
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    request = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_owner, daemon=True).start()
    _limit_silence(request["seconds"])
    sys.dont_write_bytecode = True

    def answer(content: dict[str, Any]) -> None:
        print(json.dumps(content), file=answers, flush=True)

    answer(_result(answer, **request))


def _end_with_owner() -> None:
    sys.stdin.read()
    os._exit(1)


def _limit_silence(seconds: float) -> None:
    """Give sockets without a time limit one."""
    own = socket.socket.settimeout

    def settimeout(self: Any, limit: float | None) -> None:
        own(self, seconds if limit is None else limit)

    socket.socket.settimeout = settimeout  # type: ignore[method-assign]  # that of every library
    socket.setdefaulttimeout(seconds)


def _result(
    answer: Callable[[dict[str, Any]], None],
    name: str,
    kind: str,
    revision: str | None,
    patterns: list[str] | None,
    seconds: float,
) -> dict[str, Any]:
    from huggingface_hub import HfApi, constants, errors, snapshot_download

    _guard((constants.HF_HUB_CACHE, constants.HF_HOME, tempfile.gettempdir(), "/dev", "/proc"))
    # The first that fits an error counts.
    known = {
        errors.GatedRepoError: "gated",
        errors.RepositoryNotFoundError: "missing",
        errors.RevisionNotFoundError: "revision",
        errors.LocalEntryNotFoundError: "unreachable",
        Exception: "failed",
    }
    files: list[str] = []
    failure: Exception | None = None
    try:
        try:
            info = HfApi().repo_info(name, repo_type=kind, revision=revision, timeout=seconds)
            if not COMMIT.fullmatch(info.sha or ""):
                raise Outside(f"the commit {info.sha!r:.80}")
            files = [file.rfilename for file in info.siblings or ()]
        except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError, Outside):
            raise
        except Exception as error:  # of whichever HTTP client the package has
            failure = error
        answer({})
        if patterns is not None:
            cached = failure is not None
            folder = snapshot_download(
                name, repo_type=kind, revision=revision, allow_patterns=patterns, local_files_only=cached
            )
            return {"folder": folder}
        if failure:
            raise failure
        return {"files": files}
    except Exception as error:
        word = next(word for type_, word in known.items() if isinstance(error, type_))
        return {"error": word, "hub": constants.ENDPOINT, "reason": _reason(error)}


def _reason(error: BaseException) -> str:
    """Describe the innermost cause that is ours, or the error."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, Outside):
            return f"the server asks to write {cause}, which no hub does; do not use it"
        cause = cause.__cause__ or cause.__context__
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _guard(roots: Sequence[str]) -> None:
    """Refuse to change anything outside of folders, from now on and for good."""
    allowed = tuple(os.path.join(os.path.realpath(root), "") for root in roots)

    def check(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            path, _, flags = arguments
            changed = [path] if isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT) else []
        else:
            changed = [arguments[place] for place in WRITING.get(event, ())]
        for path in changed:
            if isinstance(path, int):  # an open descriptor
                continue
            folder, last = os.path.split(os.path.abspath(os.fsdecode(path)))
            place = os.path.join(os.path.realpath(folder), last)
            if not f"{place}/".startswith(allowed):
                raise Outside(place)

    sys.addaudithook(check)


if __name__ == "__main__":
    del sys.path[0]  # modules of this folder have names of libraries
    main()
