"""The rollouts of a run while it runs: one file for each step, put together as one MindRecord when the run ends.

So a run that is killed loses none of the steps before its last checkpoint, and memory does not grow with the run.
"""

import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mindrlhf.errors import UserError
from mindrlhf.files.atomic import atomic_file, clean
from mindrlhf.records.rollout_bytes import pack_columns, unpack_columns
from mindrlhf.records.rollout_record import SCHEMA, read_rows, rows_of, write_rollout_record

_PART = re.compile(r"step_(\d+)\.npz")


class RolloutParts:
    """The parts in `FILE.parts`, beside the MindRecord `FILE` that they are to become."""

    def __init__(self, file: Path, steps_done: int = 0):
        """Keep what there is of the first `steps_done` steps, and forget all else.

        Where the run had ended before, and is to go on, the steps are taken from its MindRecord.
        Raises `UserError` when the folder cannot be read or written.
        """
        self.file = Path(file)
        self.folder = self.file.with_name(f"{self.file.name}.parts")
        clean(self.folder)
        try:
            for step, path in self._parts().items():
                if step > steps_done:
                    path.unlink()
        except OSError as error:
            raise UserError(f"{error.filename}: cannot be removed ({error.strerror}).") from error
        if steps_done and self.file.is_file():
            self._take_from_record(steps_done)
        self.missing = [step for step in range(1, steps_done + 1) if step not in self._parts()]

    def add(self, step: int, columns: Mapping[str, list]) -> None:
        """Keep a step's columns (see `rollout_record.to_columns`); they are in a file when this returns."""
        with atomic_file(self.folder / f"step_{step:06d}.npz", durable=False) as temporary:
            temporary.write_bytes(pack_columns(columns))

    def merge(self, finished: bool) -> None:
        """Write the MindRecord of all steps so far. finished: the parts are not needed any more."""
        if self._parts():
            write_rollout_record(self.file, self._rows())
        if finished:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _rows(self) -> Iterator[dict[str, Any]]:
        for path in self._parts().values():
            yield from _read(path)

    def _parts(self) -> dict[int, Path]:
        """Step -> its part, in order."""
        found = [(_PART.fullmatch(path.name), path) for path in self.folder.glob("step_*.npz")]
        return dict(sorted((int(match[1]), path) for match, path in found if match))

    def _take_from_record(self, steps_done: int) -> None:
        have = self._parts()
        if len(have) == steps_done:
            return
        steps: dict[int, list] = {}
        for row in read_rows(self.file):
            if row["step"] <= steps_done and row["step"] not in have:
                steps.setdefault(row["step"], []).append(row)
        for step, rows in steps.items():
            self.add(step, {name: [row[name] for row in rows] for name in SCHEMA})


def _read(path: Path) -> list[dict[str, Any]]:
    try:
        return rows_of(unpack_columns(path.read_bytes()))
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: is damaged ({error}); remove it, and its step is left out.") from error
