"""Checkpoints to resume from: finding, checking and reading them into any layout."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from mindrlhf.checkpoint.manifest import MANIFEST_FILE, Manifest, describe, step_folders
from mindrlhf.checkpoint.safetensors_file import index_safetensors
from mindrlhf.checkpoint.store import BEST, HF_FOLDER, LATEST, STATE_FILE
from mindrlhf.checkpoint.stored_tensor import joined
from mindrlhf.checkpoint.training_state import WEIGHTS, layout_from_json
from mindrlhf.checkpoint.verl_shards import refuse_verl_shards
from mindrlhf.checkpoint.weight_source import WeightSource
from mindrlhf.errors import UserError
from mindrlhf.files.json import read_json
from mindrlhf.files.naming import step_of
from mindrlhf.parallel.layout import Shape

_log = logging.getLogger(__name__)

_verified: set[tuple[Path, str]] = set()  # by this process: (folder, checksum of its manifest)


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """Training checkpoint with a sound manifest."""

    folder: Path
    manifest: Manifest

    @classmethod
    def open(cls, folder: Path) -> "Checkpoint":
        """Read the manifest only. Raises `UserError` for anything but a whole checkpoint."""
        folder = Path(folder).resolve()
        return cls(folder, Manifest.read(folder))

    def verify(self, part: int = 0, parts: int = 1) -> None:
        """Check the content of the files, or of every `parts`-th of them."""
        self.manifest.verify(self.folder, sorted(self.manifest.files)[part::parts])

    def verify_once(self) -> None:
        """Check all files, unless this process has found them sound before."""
        key = self.folder, describe(self.folder / MANIFEST_FILE).sha256
        if key not in _verified:
            self.verify()
            _verified.add(key)

    def verify_description(self) -> None:
        """Check the model's configuration and tokenizer, not its weights."""
        self.manifest.verify(self.folder, [name for name in self.manifest.files if name.startswith(f"{HF_FOLDER}/")])

    @property
    def step(self) -> int:
        return self.manifest.step

    @cached_property
    def state(self) -> dict[str, Any]:
        """Content of `state.json`. Raises `UserError` for content that no run writes."""
        content = read_json(self.folder / STATE_FILE)
        for key, kind in (("counters", dict), ("run", dict), ("groups", dict), ("layouts", list)):
            if not isinstance(content.get(key), kind):
                raise self._strange(f"{key} is {type(content.get(key)).__name__}")
        return content

    @contextmanager
    def understood(self, key: str) -> Iterator[None]:
        """Turn errors about the content of a key of `state.json` into a `UserError`."""
        try:
            yield
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
            raise self._strange(f"{key}: {type(error).__name__} {error}") from error

    def _strange(self, state: str) -> UserError:
        return UserError(
            f"{self.folder / STATE_FILE}: does not hold what a run saves ({state}); use an earlier checkpoint."
        )

    @property
    def counters(self) -> dict[str, Any]:
        return self.state["counters"]

    @property
    def run(self) -> dict[str, Any]:
        return self.state["run"]

    @property
    def hf_folder(self) -> Path:
        return self.folder / HF_FOLDER

    def companion(self, name: str) -> bytes | None:
        """Read a further file; None when it is absent."""
        return (self.folder / name).read_bytes() if name in self.manifest.files else None

    @property
    def groups(self) -> tuple[str, ...]:
        return tuple(self.state["groups"])

    def weights(self, kind: str = WEIGHTS, shapes: Mapping[str, Shape] | None = None) -> WeightSource:
        """Open the stored arrays of one kind, which must have the full `shapes`."""
        if kind not in self.groups:
            raise UserError(f"{self.folder}: holds {', '.join(self.groups)}, and no {kind}; give one that does.")
        with self.understood(f"the layout of {kind}"):
            layout = layout_from_json(self.state["layouts"][self.state["groups"][kind]])
        if shapes not in (None, layout.shapes):
            name, shape = min(layout.shapes.items() ^ shapes.items())
            raise UserError(
                f"{self.folder}: is a checkpoint of another model ({name} {list(shape)} is in one of the two only)."
            )
        files = {rank: self.folder / f"rank_{rank}" / f"{kind}.safetensors" for rank in layout.ranks}
        ranks = {rank: index_safetensors(file) if file.exists() else {} for rank, file in files.items()}
        with self.understood(f"the layout of {kind}"):
            return WeightSource.of(self.folder, layout, {rank: joined(tensors) for rank, tensors in ranks.items()})


def locate(path: str | Path) -> list[Path]:
    """List the checkpoints that a path may mean, in order of preference.

    A `step_N` folder and the files `latest` and `best` mean one checkpoint; a folder of checkpoints means the newest.
    """
    path = Path(path)
    if path.is_file() and path.name in (LATEST, BEST):
        return [_pointed(path)]
    if (path / MANIFEST_FILE).exists():
        return [path]
    found = step_folders(path)
    if not found:
        refuse_verl_shards(path)
        raise UserError(f"{path}: holds no training checkpoint; give a step_N folder, or a folder with some of them.")
    return found


def _pointed(pointer: Path) -> Path:
    """Find the checkpoint that `latest` or `best` names, with the checksum recorded there."""
    try:
        name, checksum = pointer.read_text(encoding="utf-8").split()
    except (OSError, ValueError):
        name, checksum = "", ""
    folder = pointer.parent / name
    manifest = folder / MANIFEST_FILE
    beside = folder.parent == pointer.parent
    if not beside or step_of(folder) is None or not manifest.is_file() or describe(manifest).sha256 != checksum:
        raise UserError(f"{pointer}: names no whole checkpoint; give a step_N folder itself.")
    return folder


def is_checkpoint(path: str | Path) -> bool:
    """Test for a checkpoint by its path: `step_N`, `latest`, `best`, or their folder."""
    path = Path(path)
    if path.is_file():
        return path.name in (LATEST, BEST)
    return (path / MANIFEST_FILE).exists() or step_of(path.resolve()) is not None or bool(step_folders(path))


def newest(path: str | Path, check: Callable[[Checkpoint], None] = Checkpoint.verify_once) -> Checkpoint:
    """Return the first checkpoint of a path that passes `check`; report damaged ones."""
    checkpoint, problems = choose(locate(path), check=check)
    for problem in problems:
        _log.warning("%s The checkpoint %s is used.", problem, checkpoint.folder)
    return checkpoint


def choose(
    candidates: Sequence[Path],
    agree: Callable[[str | None], str | None] = lambda problem: problem,
    check: Callable[[Checkpoint], None] = Checkpoint.verify,
) -> tuple[Checkpoint, list[str]]:
    """Return the first sound candidate, and the errors of those before it.

    agree: shares this rank's error (None for a sound candidate) and returns the first error of all ranks.
    check: raises `UserError` for a damaged candidate; ranks may share the work of reading the files.
    """
    problems: list[str] = []
    for folder in candidates:
        checkpoint = None
        problem = None
        try:
            checkpoint = Checkpoint.open(folder)
            check(checkpoint)
        except UserError as error:
            problem = str(error)
        problem = agree(problem)
        if problem is None:
            return checkpoint, problems
        problems.append(problem)
    raise UserError(problems[0] if len(problems) == 1 else f"no checkpoint can be used: {' '.join(problems)}")
