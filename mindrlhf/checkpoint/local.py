"""Models by path, hub id or GGUF file, as local folders."""

from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from mindrlhf.errors import UserError
from mindrlhf.hub.models import hub_folder
from mindrlhf.hub.names import is_id
from mindrlhf.model_roles import ROLES

# Flags of commands that name a model.
FLAGS = (
    *("model", "compare", "base", "src_checkpoint"),
    *(role.flag for role in ROLES.values() if role.flag),
)

SUFFIX = ".gguf"

Flags = TypeVar("Flags", bound=Any)


def local_models(flags: Flags, weights: bool = True) -> Flags:
    """Replace the models in a command's flags by their local folders.

    weights: False for configuration and tokenizer only. Raises UserError.
    """
    given = {name: value for name, value in vars(flags).items() if name in FLAGS and value is not None}
    local = {name: type(value)(local_model(str(value), weights)) for name, value in given.items()}
    return type(flags)(**vars(flags) | local)


@cache
def local_model(name: str, weights: bool = True) -> str:
    """Find a model's local folder or file.

    It is the folder of a hub's id in the hub's cache, the folder of a GGUF file in the user's cache (also if the file
    is the only model in a folder), or the path itself. weights: False for configuration and tokenizer of a hub's id
    only. Raises UserError.
    """
    if is_id(name):
        return hub_folder(name, weights)
    file = gguf_file(Path(name))
    if file is None:
        return name
    from mindrlhf.checkpoint.gguf.folder import cached_folder  # it imports `gguf`, which other models do without

    return str(cached_folder(file))


def gguf_file(path: Path) -> Path | None:
    """Find the GGUF file that a model's path means, or None.

    It is the path itself, or the only GGUF file in a folder without other weights and without folders. Raises UserError
    for several files.
    """
    if path.suffix.lower() == SUFFIX:
        return path if path.is_file() else None
    try:
        found = [one for one in sorted(path.iterdir()) if not one.name.startswith(".")]
    except OSError:  # no folder, or one that others explain
        return None
    files = [one for one in found if one.suffix.lower() == SUFFIX]
    if not files or any(one.is_dir() or one.suffix in (".safetensors", ".ckpt") for one in found):
        return None
    if len(files) > 1:
        raise UserError(f"{path}: has {len(files)} GGUF files; name the one that you mean, {files[0]} say.")
    return files[0]
