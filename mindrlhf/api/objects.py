"""Objects of the calling program as flags and settings name them: datasets, functions, tokenizers."""

import inspect
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.util import find_spec
from itertools import chain, count
from pathlib import Path
from typing import Any

from mindrlhf.backend.process.launch import is_first_process
from mindrlhf.checkpoint.local import local_model
from mindrlhf.checkpoint.peft_config import lora_settings
from mindrlhf.configs.images import PREPROCESSOR_FILE, PROCESSOR_FILE
from mindrlhf.data.source import IMAGE_COLUMNS, is_source, read_source
from mindrlhf.data.tokenizer import FILES, Tokenizer
from mindrlhf.errors import UserError
from mindrlhf.files.atomic import make_folder
from mindrlhf.files.text import is_there

TEXT = "text"  # column of whole texts for fine-tuning
OWN = "python"  # place of the program's own functions in `place:function`

Rows = Sequence[Mapping[str, Any]]


def rows_of(dataset: Any, name: str) -> Rows | str | None:
    """Return a dataset's rows, or the path of its file.

    dataset: rows, a `datasets.Dataset`, a path or None. Raises UserError for another kind.
    """
    if dataset is None or isinstance(dataset, str | Path):
        return None if dataset is None else str(dataset)
    if isinstance(dataset, Mapping):
        splits = ", ".join(map(repr, dataset)) or "none"
        raise UserError(f"{name}: has splits ({splits}), and one is needed; give one of them, {name}['train'] say.")
    if not isinstance(dataset, Iterable):
        raise UserError(f"{name}: is {type(dataset).__name__}; give a list of dicts, a datasets.Dataset or a path.")
    return list(dataset)


def text_rows(dataset: Any, name: str, field: str, formatting_func: Callable[[Any], str] | None) -> Any:
    """Return the dataset with whole texts under `text`.

    field: column of the texts. formatting_func: makes a row's text instead. Raises UserError for a file, whose rows
    have to be in the right form, and for a function that gives something else than a text.
    """
    if dataset is None or (formatting_func is None and field == TEXT):
        return dataset
    rows = rows_of(dataset, name)
    if isinstance(rows, str):
        what = "formatting_func" if formatting_func else f"dataset_text_field={field!r}"
        raise UserError(f"{name}: {what} needs rows, and {rows} is a file; read it with datasets.load_dataset first.")
    texts: list[dict[str, Any]] = []
    for number, row in enumerate(rows or ()):
        text = formatting_func(row) if formatting_func else row.get(field)
        if formatting_func and not isinstance(text, str):
            found = f"{name}, row {number}: formatting_func gives {type(text).__name__}"
            raise UserError(f"{found}, and must give one text for one row.")
        shown = {key: row[key] for key in IMAGE_COLUMNS if row.get(key) is not None}
        texts.append(dict(row) if text is None else {TEXT: text} | shown)
    return texts


def number_of_rows(rows: Rows | str | None) -> int | None:
    """Count rows; None for a MindRecord, which only MindSpore reads."""
    if isinstance(rows, str):
        return len(read_source(rows)) if is_source(rows) else None
    return None if rows is None else len(rows)


def named_functions(functions: Any) -> tuple[list[str], dict[str, Callable[..., Any]]]:
    """Name reward functions as settings do.

    Returns all names in order, and the program's own functions by name. functions: one or several, each a callable or a
    name. Raises UserError for another kind.
    """
    names: list[str] = []
    own: dict[str, Callable[..., Any]] = {}
    for one in [functions] if callable(functions) or isinstance(functions, str) else functions:
        if isinstance(one, str):
            names.append(one)
        elif callable(one):
            choices = chain([""], (f"_{number}" for number in count(2)))
            names.append(next(name for end in choices if (name := f"{OWN}:{name_of(one)}{end}") not in own))
            own[names[-1]] = one
        else:
            right = "give a function, the name of a shipped one, or file.py:function; reward models are not done here"
            raise UserError(f"reward_funcs: {type(one).__name__} is no reward function; {right}.")
    return names, own


def name_of(function: Callable[..., Any]) -> str:
    """Return the name of a function, a class, or a callable object."""
    inner = getattr(function, "func", function)  # of a partial
    return (getattr(inner, "__name__", None) or type(inner).__name__).strip("<>")


def importable_names(objects: Iterable[Any] | None, what: str) -> list[str]:
    """Return the names by which other processes import functions or classes.

    An object of the program's own file becomes `file.py:name`. what: the argument's name, for messages. Raises
    UserError for an object that has no such name.
    """
    return [one if isinstance(one, str) else _importable_name(one, what) for one in objects or ()]


def _importable_name(one: Any, what: str) -> str:
    name = getattr(one, "__qualname__", "")
    module = sys.modules.get(getattr(one, "__module__", None) or "")
    try:
        file = Path(inspect.getsourcefile(one) or "")
    except TypeError:  # neither a function nor a class of Python's
        file = Path()
    if name.isidentifier() and file.suffix == ".py" and file.is_file():
        known = module is not None and getattr(module, name, None) is one
        if module and known and module.__name__ != "__main__" and find_spec(module.__name__):
            return f"{module.__name__}:{name}"
        return f"{file.absolute()}:{name}"
    found = f"{what}: {name_of(one)} is an object of this program, and calls run in processes of their own"
    right = f"define it at the top of a file, or give its name, tools.py:{name_of(one)} say"
    raise UserError(f"{found}; {right}.")


def adapter_settings(peft_config: Any) -> dict[str, Any]:
    """Convert a `LoraConfig`, or a mapping of its values, to dotted settings."""
    if peft_config is None:
        return {}
    raw = peft_config.to_dict() if hasattr(peft_config, "to_dict") else peft_config
    values = lora_settings(raw if isinstance(raw, Mapping) else vars(raw), "peft_config")
    return {f"lora.{name}": value for name, value in values.items()}


class TokenizerFolder(str):
    """Path of a tokenizer, with the method that programs call."""

    def save_pretrained(self, save_directory: str | Path, **_: Any) -> None:
        """Write the tokenizer's files to a folder, and those of its processor of images."""
        folder = Path(save_directory)
        own = local_model(str(self), weights=False)
        make_folder(folder)
        Tokenizer.from_path(own).save(folder)
        for name in (PREPROCESSOR_FILE, PROCESSOR_FILE):
            if is_there(Path(own, name)):
                shutil.copyfile(Path(own, name), folder / name)


def model_path(model: Any, where: str) -> str | None:
    """Return a model's path.

    An object of transformers is read again from the path that it came from. where: name of the trainer. Raises
    UserError for an object without a path, and for one with adapters.
    """
    if model is None or isinstance(model, str | Path):
        return None if model is None else str(model)
    found = f"{where}: model is an object, {type(model).__name__}"
    path = getattr(model, "name_or_path", None) or getattr(getattr(model, "config", None), "_name_or_path", None)
    if not isinstance(path, str) or not path:
        raise UserError(f"{found}, without a path, and models are read from disk here; give a folder or a hub's id.")
    if getattr(model, "peft_config", None):
        raise UserError(f"{found} with adapters of {path}; give that path, and the adapters' settings as peft_config.")
    if is_first_process():
        print(f"{found}: it is read again from {path}, without changes made in memory", flush=True)
    return path


def refuse_given(where: str, given: Mapping[str, Any], reasons: Mapping[str, str]) -> None:
    """Refuse arguments that have another value than None.

    where: name of the trainer. given, reasons: argument -> its value, and what would be right. Raises UserError.
    """
    for name, reason in reasons.items():
        if given[name] is not None:
            raise UserError(f"{where}: {name} is given, which is not done here; {reason}.")


def tokenizer_path(processing_class: Any, folder: str) -> str | None:
    """Return the path of a tokenizer; an object is saved in `folder`.

    processing_class: a path or a hub's id; our `Tokenizer`; a tokenizer or a processor of transformers.
    """
    if processing_class is None or isinstance(processing_class, str | Path):
        return None if processing_class is None else str(processing_class)
    if isinstance(processing_class, Tokenizer):
        processing_class.save(folder)
    elif hasattr(processing_class, "save_pretrained"):
        processing_class.save_pretrained(folder)
    if not any(is_there(Path(folder, name)) for name in FILES):
        found = f"processing_class: is {type(processing_class).__name__}"
        raise UserError(f"{found}, which has no tokenizer; give a tokenizer's path, or one of transformers.")
    return folder
