"""Training checkpoints on disk: one folder per step, complete or absent.

Every rank writes its parts, and a manifest of them, into one hidden temporary folder on a disk that all ranks see; rank
0 waits for all of them, writes the manifest, renames the folder, updates the pointers, and only then, alongside the
training, removes old checkpoints.
"""

import hashlib
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from mindrlhf.checkpoint.manifest import MANIFEST_FILE, Manifest, StoredFile, describe, step_folders
from mindrlhf.checkpoint.safetensors_file import write_safetensors
from mindrlhf.checkpoint.snapshot import Snapshot
from mindrlhf.checkpoint.training_state import ShardGroup, TrainingState, layout_to_json
from mindrlhf.errors import UserError
from mindrlhf.files.atomic import atomic_file, explained, put_in_place, remove_folder, sync, sync_folder, temporary_name
from mindrlhf.files.naming import step_of, step_path
from mindrlhf.optimizer_state import SCALES

STATE_FILE = "state.json"
HF_FOLDER = "hf"  # of a checkpoint: the model's configuration and tokenizer
LATEST, BEST = "latest", "best"
POLL_S = 0.02
WRITING_THREADS = 4  # digests and waits for the disk overlap
PART_TIMEOUT_S = 3600.0  # another rank may be writing to a slow disk for long


class CheckpointStore:
    """Writer of one run's checkpoints, which every rank uses in the same way.

    folder: `save_ckpt_dir`. rank: this process. ranks: all that save; the first completes checkpoints. token: 8
    hexadecimal digits, the same on all ranks and different in each run. keep: number of checkpoints to keep, the best
    one not counted; None keeps all.
    asynchronous: write in a thread, from copies that `settle` makes. If writing fails, the next call raises the error.
    best_step: the step of the best checkpoint of the run so far. implied: called on the first rank before a checkpoint
    is complete, by the thread that writes; it blocks until all other files of the steps so far are written.
    """

    def __init__(
        self,
        folder: Path,
        rank: int,
        ranks: Sequence[int],
        token: str,
        keep: int | None = None,
        asynchronous: bool = False,
        best_step: int | None = None,
        implied: Callable[[], None] = lambda: None,
    ):
        self.folder = Path(folder).resolve()
        self._rank = rank
        self._ranks = ranks
        self._token = token
        self._is_first = rank == ranks[0]
        self._keep = keep
        self._asynchronous = asynchronous
        self.best_step = best_step
        self._implied = implied
        self._thread: threading.Thread | None = None
        self._snapshot: Snapshot | None = None  # of the thread, until the arrays may change
        self._failure: BaseException | None = None

    def save(self, state: TrainingState, best: bool = False) -> None:
        """Write the checkpoint of a step, replacing one of the same step.

        Returns when this rank's files are written, and on the first rank when the checkpoint is complete; with
        `asynchronous` it returns at once, and the arrays may change after `settle`. A thread removes old checkpoints.
        best: the checkpoint is the best so far. Raises `UserError` when writing fails.
        """
        self.wait()
        groups = {}
        for kind, group in state.groups.items():
            own = group.layout.writers.get(self._rank, ())
            scales = (f"{name}{SCALES}" for name in own)
            mine = {name: group.shards[name] for name in (*own, *scales) if name in own or name in group.shards}
            groups[kind] = ShardGroup(group.layout, mine)
        mine = replace(state, groups=groups)
        snapshot = Snapshot(groups)
        if self._asynchronous:
            self._snapshot = snapshot
            self._begin(partial(self._write, mine, snapshot, best), self._remove_old)
        else:
            self._write(mine, snapshot, best)
            self._begin(self._remove_old)

    def settle(self) -> None:
        """Copy the last `save`'s arrays that are not written yet; all may change then."""
        snapshot = self._snapshot
        self._snapshot = None
        if snapshot:
            snapshot.settle()

    def check(self) -> None:
        if self._failure is not None:
            failure = self._failure
            self._failure = None
            raise failure

    def wait(self) -> None:
        """Wait until nothing is being written; raises as `check`."""
        if self._thread is not None:
            self._thread.join()
            self._thread = self._snapshot = None
        self.check()

    def with_advice(self, error: UserError) -> UserError:
        """Add to an error the checkpoint from which a run can continue."""
        left = "no earlier checkpoint is there"
        with suppress(UserError, StopIteration):
            whole = next(path for path in step_folders(self.folder) if (path / MANIFEST_FILE).exists())
            left = f"{whole.name} is whole, and --resume_training auto continues from it"
        return UserError(f"{str(error).rstrip('.')} ({left}).")

    @contextmanager
    def advising(self) -> Iterator[None]:
        """Add to errors of the body the checkpoint from which a run can continue."""
        try:
            yield
        except UserError as error:
            raise self.with_advice(error) from None

    def _begin(self, *jobs: Callable[[], None]) -> None:
        """Do jobs in a thread, one after the other."""
        self._thread = threading.Thread(target=self._try, args=jobs, daemon=True)
        self._thread.start()

    def _try(self, *jobs: Callable[[], None]) -> None:
        try:
            for job in jobs:
                job()
        except BaseException as error:
            self._failure = error

    def _write(self, state: TrainingState, snapshot: Snapshot, best: bool) -> None:
        target = step_path(self.folder, state.step)
        temporary = temporary_name(target, self._token)
        try:
            self._write_part(state, snapshot, temporary)
            if self._is_first:
                self._complete(state, temporary, target)
                self._point(LATEST, target)
                if best:
                    self._point(BEST, target)
                    self.best_step = state.step
        except BaseException as error:
            self._discard(temporary)
            known = explained(error, target, temporary) if isinstance(error, OSError) else error
            raise self.with_advice(known) if isinstance(known, UserError) else known from error

    def _write_part(self, state: TrainingState, snapshot: Snapshot, temporary: Path) -> None:
        """Write this rank's files, then a manifest of them.

        Threads write several files at a time, or one alongside the training, which needs the processors itself. Waiting
        for the disk begins once all arrays are read.
        """
        folder = temporary / f"rank_{self._rank}"
        folder.mkdir(parents=True, exist_ok=True)
        jobs = {
            f"{folder.name}/{kind}.safetensors": partial(_write_arrays, kind, group, snapshot)
            for kind, group in state.groups.items()
            if group.shards
        }
        if self._is_first:
            contents = {**state.companions, STATE_FILE: _state_json(state)}
            jobs |= {name: partial(_write_content, content) for name, content in contents.items()}
        with ThreadPoolExecutor(1 if self._asynchronous else WRITING_THREADS) as pool:
            writing = {name: pool.submit(write, temporary / name) for name, write in jobs.items()}
            syncing = [pool.submit(_sync_written, each, temporary / name) for name, each in writing.items()]
        for each in syncing:
            each.result()
        Manifest(state.step, {name: each.result() for name, each in writing.items()}).write(folder, durable=False)

    def _complete(self, state: TrainingState, temporary: Path, target: Path) -> None:
        """Write the manifest of all ranks' files, then rename the folder."""
        files: dict[str, StoredFile] = {}
        for rank in self._ranks:
            files |= self._part(temporary / f"rank_{rank}")
        self._implied()
        Manifest(state.step, files).write(temporary)
        with ThreadPoolExecutor(WRITING_THREADS) as pool:
            # list: a map raises errors only when its results are taken
            list(pool.map(sync_folder, (*(path for path in temporary.iterdir() if path.is_dir()), temporary)))
        put_in_place(temporary, target)

    def _part(self, folder: Path) -> Mapping[str, StoredFile]:
        """Take the manifest of one rank once it exists."""
        path = folder / MANIFEST_FILE
        deadline = time.monotonic() + PART_TIMEOUT_S
        while not path.exists():
            if time.monotonic() > deadline:
                raise UserError(
                    f"{folder}: was not written in {PART_TIMEOUT_S:g} s; use a folder on a disk that all ranks share."
                )
            time.sleep(POLL_S)
        files = Manifest.read(folder).files
        path.unlink()
        if not any(folder.iterdir()):
            folder.rmdir()
        return files

    def _point(self, name: str, target: Path) -> None:
        with atomic_file(self.folder / name) as temporary:
            temporary.write_text(f"{target.name}\n{describe(target / MANIFEST_FILE).sha256}\n", encoding="utf-8")

    def _remove_old(self) -> None:
        """Remove checkpoints beyond the newest and the best, on the first rank."""
        if not self._is_first or self._keep is None:
            return
        for old in [path for path in step_folders(self.folder) if step_of(path) != self.best_step][self._keep :]:
            try:
                remove_folder(old)
            except OSError as error:
                found = f"{old}: this old checkpoint cannot be removed ({error.strerror}); remove it"
                raise self.with_advice(UserError(found)) from error

    def _discard(self, temporary: Path) -> None:
        """Remove this rank's files of a failed checkpoint; the first rank removes all."""
        with suppress(OSError):
            remove_folder(temporary if self._is_first else temporary / f"rank_{self._rank}")


def _write_arrays(kind: str, group: ShardGroup, snapshot: Snapshot, path: Path) -> StoredFile:
    """Write one kind of arrays, each as it is."""
    digest = hashlib.sha256()
    shapes = [(name, array.shape) for name, array in group.shards.items()]
    dtypes = {name: str(array.dtype) for name, array in group.shards.items()}
    with closing(snapshot.take(kind)) as arrays:
        write_safetensors(path, shapes, arrays, dtypes, {"format": "ms"}, digest)
    return StoredFile(path.stat().st_size, digest.hexdigest())


def _write_content(content: bytes, path: Path) -> StoredFile:
    """Write one further file."""
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)
    return StoredFile(len(content), hashlib.sha256(content).hexdigest())


def _sync_written(writing: Future, path: Path) -> None:
    """Bring a file to the disk once it is written."""
    writing.result()
    sync(path)


def _state_json(state: TrainingState) -> bytes:
    """Format `state.json`; groups share equal layouts."""
    layouts: list[dict[str, Any]] = []
    groups: dict[str, int] = {}
    for kind, group in state.groups.items():
        layout = layout_to_json(group.layout)
        if layout not in layouts:
            layouts.append(layout)
        groups[kind] = layouts.index(layout)
    content = {"step": state.step, "counters": state.counters, "run": state.run, "groups": groups, "layouts": layouts}
    return json.dumps(content, ensure_ascii=False).encode()
