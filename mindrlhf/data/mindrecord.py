"""MindRecord files: atomic writing of columns, reading of prompts and answers.

A MindRecord is a pair of files that must not be renamed: the data `X` and its index `X.db`, which has the name `X` in
it. A prompt dataset has these columns:

prompt_ids     int64[max_prompt_length]  prompt, padded on the right with the pad id
pretrain_ids   int64[seq_length]         prompt, worked answer and end token, padded the same way
loss_mask      int64[seq_length]         1 on the answer and its end token, 0 elsewhere
task, question, ground_truth, extra      text; extra is a JSON object of other fields, and of their types
row_index      int64                     row of the source file, from 0
prompt_length  int64                     prompt tokens, without padding

The first three are MindRLHF's. A file made by MindRLHF has only these and can be read with a tokenizer: its prompts end
before the trailing pads, and its `pretrain_ids` hold the solution, with or without the prompt before it.
"""

import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from mindrlhf.data.tasks.gsm8k import final_answer
from mindrlhf.data.tasks.task import TaskRow, is_missing, prompt_fields
from mindrlhf.data.tokenizer import Tokenizer
from mindrlhf.errors import UserError
from mindrlhf.files.atomic import atomic_files
from mindrlhf.files.json import parse_json
from mindrlhf.hub.names import is_id
from mindrlhf.rewards.columns import value_of
from mindrlhf.types import Prompt

ROWS_PER_WRITE = 256
MINDRLHF_COLUMNS = ("prompt_ids", "pretrain_ids", "loss_mask")
PROMPT_COLUMNS = ("prompt_ids", "prompt_length", "row_index", "task", "question", "ground_truth", "extra")
PROMPT_SCHEMA = {
    "row_index": {"type": "int64"},
    **{column: {"type": "int64", "shape": [-1]} for column in MINDRLHF_COLUMNS},
    "prompt_length": {"type": "int64"},
    **{column: {"type": "string"} for column in ("task", "question", "ground_truth", "extra")},
}


def write_columns(
    path: str | Path,
    schema: Mapping[str, Mapping[str, Any]],
    rows: Iterable[Mapping[str, Any]],
    page_bytes: int | None = None,
) -> int:
    """Write rows as the MindRecord `path`, replacing an earlier one; returns their number.

    schema: column -> {"type": ...} for scalars (int32, int64, float32, float64, string, bytes), with "shape": [-1] for
    arrays of this dtype, as MindSpore's FileWriter takes it; float scalars need an int64 column too. page_bytes: most
    bytes of a row, if these are more than MindSpore's 32 MiB; the file is as long at least, and sparse.
    UserError for no rows or a file that cannot be written, ValueError for a row that does not fit the schema.
    """
    from mindspore.mindrecord import FileWriter

    path = Path(path)
    count = 0
    pending = iter(rows)
    with atomic_files(path.parent) as stage:
        with _mindspore_errors(path):
            writer = FileWriter(str(stage / path.name), shard_num=1)
            writer.add_schema({column: dict(kind) for column, kind in schema.items()}, path.name)
            if page_bytes:
                writer.set_page_size(page_bytes)
            if whole := [name for name, kind in schema.items() if kind == {"type": "int64"}]:
                writer.add_index(whole[:1])  # without this MindSpore indexes floats too, and aborts at NaN
        while chunk := [dict(row) for row in islice(pending, ROWS_PER_WRITE)]:
            first = count
            count = count + len(chunk)
            with _mindspore_errors(path):
                writer.write_raw_data(chunk)  # drops rows that do not fit, and only logs a line
            if lost := count - first - len(chunk):
                raise ValueError(f"{path}: {lost} of rows {first}..{count - 1} do not fit the schema")
        if not count:
            raise UserError(f"{path}: there are no rows to write.")
        with _mindspore_errors(path):
            writer.commit()
        _open_to_readers(stage)
    return count


def _open_to_readers(folder: Path) -> None:
    """Give files the mode that the umask gives; MindSpore's have 600."""
    probe = folder / "mode"
    probe.touch()
    mode = probe.stat().st_mode
    probe.unlink()
    for file in folder.iterdir():
        file.chmod(mode)


def read_columns(path: str | Path, columns: Sequence[str] | None = None) -> dict[str, list[Any]]:
    """Read columns, by default all, as lists of int, float, str or arrays.

    UserError when the file or its .db is missing, renamed, damaged or no MindRecord, has no rows, or lacks a column.
    """
    from mindspore.mindrecord import FileReader

    path = Path(path)
    found = read_schema(path)
    missing = [column for column in columns or () if column not in found]
    if missing:
        raise UserError(f"{path}: has no column {', '.join(missing)}; it has {', '.join(found)}.")
    wanted = list(found if columns is None else columns)
    with _mindspore_errors(path, reading=True), closing(FileReader(str(path), 1, wanted)) as reader:
        rows = [[row[column] for column in wanted] for row in reader.get_next()]
    if not rows:
        raise UserError(f"{path}: holds no rows.")
    return dict(zip(wanted, map(list, zip(*rows, strict=True)), strict=True))


def read_schema(path: str | Path) -> dict[str, dict[str, Any]]:
    """Read column -> {"type": ..., "shape": ...}; UserError as `read_columns`."""
    from mindspore.mindrecord import FileReader

    path = Path(path)
    _check_pair(path)
    with _mindspore_errors(path, reading=True), closing(FileReader(str(path), num_consumer=1)) as reader:
        return reader.schema()


def read_prompts(path: str | Path, tokenizer: Tokenizer | None = None) -> list[Prompt]:
    """Read the prompts of a dataset in row order.

    id: the row of the source file. fields: task, question, ground_truth (if the row has one) and the extras. A file
    made by MindRLHF needs the tokenizer: its question is the decoded prompt, its ground truth is the text after `####`
    in the solution, or the whole solution. UserError as `read_columns`.
    """
    path = Path(path)
    if _made_by_mindrlhf(path):
        return [
            Prompt(row, ids, prompt_fields("mindrlhf", TaskRow(tokenizer.decode(ids), "", _truth(solution))))
            for row, (ids, solution) in enumerate(_read_mindrlhf(path, tokenizer))
        ]
    columns = read_columns(path, PROMPT_COLUMNS)
    rows = (dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True))
    return [_prompt(row, f"{path}, row {number}") for number, row in enumerate(rows)]


def _prompt(row: Mapping[str, Any], where: str) -> Prompt:
    """Turn a dataset's row into a prompt, if `mindrlhf data` has written it."""
    try:
        length = row["prompt_length"]
        extra = parse_json(row["extra"])
        texts = {name: row[name] for name in ("task", "question", "ground_truth")}
        if not 1 <= length <= len(row["prompt_ids"]):
            raise ValueError(f"prompt_length is {length} of {len(row['prompt_ids'])}")
        fields = texts | extra
        if not all(isinstance(text, str) for text in fields.values()):
            raise ValueError("a field is not text")
        if is_missing(value_of(fields, "ground_truth")):
            del fields["ground_truth"]
        return Prompt(int(row["row_index"]), token_ids(row["prompt_ids"][:length]), fields)
    except (ValueError, TypeError, AttributeError) as error:
        raise UserError(f"{where}: is no prompt that `mindrlhf data` wrote ({error}); write the file again.") from None


def token_ids(values: np.ndarray) -> np.ndarray:
    """Convert a file's token ids to int32. Raises ValueError for other numbers."""
    if values.dtype.kind not in "iu" or values.min(initial=0) < 0 or values.max(initial=0) > np.iinfo(np.int32).max:
        raise ValueError("a token id is not between 0 and 2**31 - 1")
    return values.astype(np.int32)


def read_pairs(path: str | Path, tokenizer: Tokenizer | None = None) -> list[tuple[np.ndarray, np.ndarray]]:
    """Read (prompt ids int32[P], answer ids int32[A]) of rows with an answer, for SFT.

    Answers have their end token. A file made by MindRLHF needs the tokenizer. UserError as `read_columns`, and when no
    row has an answer.
    """
    path = Path(path)
    if _made_by_mindrlhf(path):
        return [
            (prompt_ids, np.array(tokenizer.ended(tokenizer.encode(solution)), np.int32))
            for prompt_ids, solution in _read_mindrlhf(path, tokenizer)
        ]
    columns = read_columns(path, ("pretrain_ids", "loss_mask", "prompt_length"))
    pairs = [
        (ids[:length].astype(np.int32), ids[mask == 1].astype(np.int32))
        for ids, mask, length in zip(*columns.values(), strict=True)
        if np.any(mask == 1)
    ]
    if not pairs:
        found = f"{path}: no row has a worked answer, and SFT trains on answers"
        raise UserError(f"{found}; convert a source that has them.")
    return pairs


def _made_by_mindrlhf(path: Path) -> bool:
    """Test that a file has MindRLHF's three columns and none of ours."""
    found = read_schema(path)
    return set(MINDRLHF_COLUMNS) <= set(found) and not {"ground_truth", "prompt_length"} & set(found)


def _read_mindrlhf(path: Path, tokenizer: Tokenizer | None) -> list[tuple[np.ndarray, str]]:
    """Read (prompt ids int32[P], solution text) from a file made by MindRLHF."""
    if tokenizer is None:
        raise UserError(f"{path}: was made by MindRLHF and holds token ids only; give the tokenizer it was made with.")
    columns = read_columns(path, ("prompt_ids", "pretrain_ids"))
    pad = tokenizer.pad_token_id
    rows = []
    for row, pair in enumerate(zip(*columns.values(), strict=True)):
        ids, whole = (each[: np.flatnonzero(np.append(True, each != pad))[-1]].astype(np.int32) for each in pair)
        if not len(ids):
            raise UserError(f"{path}, row {row}: the prompt is nothing but padding; remove the row.")
        # As text, because the prompt's last token may have merged with the first of the solution.
        prompt, text = (tokenizer.decode(each, skip_special_tokens=True) for each in (ids, whole))
        rows.append((ids, text.removeprefix(prompt)))
    return rows


def _truth(solution: str) -> str:
    try:
        return final_answer(solution)
    except ValueError:
        return solution.strip()


def _check_pair(path: Path) -> None:
    """Refuse files that MindSpore cannot open, or would confuse with others."""
    database = path.with_name(path.name + ".db")
    if not path.is_file():
        right = f"; make one of the dataset with `mindrlhf data --dataset {path}`" if is_id(path) else ""
        raise UserError(f"{path}: no such MindRecord file{right}.")
    try:
        with path.open("rb") as file:
            head = file.read(9)
        if head[8:] != b"{":  # eight bytes of length, then a JSON header
            raise UserError(f"{path}: is not a MindRecord file; make one with `mindrlhf data`.")
        if not database.is_file():
            raise UserError(f"{path}: its index {database.name} is not beside it; move both files together.")
        database.open("rb").close()  # raises an error with a reason; sqlite3's has none
        with closing(sqlite3.connect(f"{database.absolute().as_uri()}?mode=ro", uri=True)) as connection:
            names = [str(name) for (name,) in connection.execute("SELECT NAME FROM SHARD_NAME")]
    except OSError as error:
        raise UserError(f"{error.filename}: cannot be read ({error.strerror}).") from None
    except sqlite3.Error:
        raise UserError(f"{database}: is not the index of a MindRecord file; write {path.name} again.") from None
    if path.name not in names:
        found = f"{path}: was made as {', '.join(names)}, and a MindRecord cannot be renamed"
        raise UserError(f"{found}; give it and its .db that name back.")


@contextmanager
def _mindspore_errors(path: Path, reading: bool = False) -> Iterator[None]:
    """Turn MindSpore's errors about a file into one sentence."""
    from mindspore.mindrecord.common.exceptions import MindRecordException

    crafted = (LookupError, TypeError, ValueError) if reading else ()
    try:
        yield
    except (RuntimeError, MindRecordException, *crafted) as error:
        if reading:
            raise UserError(f"{path}: is damaged or cut short; write it again.") from None
        lines = [line.strip() for line in str(error).splitlines()]  # a banner, the sentence, a C++ stack
        tagged = [line.removeprefix("[ERROR]").strip() for line in lines if line.startswith("[ERROR]")]
        reason = (tagged or lines)[0].rstrip(".")
        raise UserError(f"{path}: cannot be written as a MindRecord ({reason}).") from None
