"""Models of a hub, as local folders."""

from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from mindrlhf.errors import UserError
from mindrlhf.files.atomic import stays_below
from mindrlhf.files.json import read_json
from mindrlhf.hub.download import download, fetch_command
from mindrlhf.hub.names import is_id
from mindrlhf.model_roles import ROLES

INDEX = "model.safetensors.index.json"
WHOLE = "model.safetensors"
ADAPTER = "adapter_model.safetensors"
# Files of a model's description and its tokenizer, and files of its weights.
FILES = (
    *(
        "config.json",
        "generation_config.json",
        "adapter_config.json",
        "mindrlhf_adapter.json",
        "tokenizer*.json",
        "tokenizer.model",
    ),
    *("vocab.json", "merges.txt", "added_tokens.json", "special_tokens_map.json", "chat_template.jinja"),
    "additional_chat_templates/*.jinja",
)
WEIGHTS = (WHOLE, "model-*.safetensors", INDEX, ADAPTER)
# Flags of commands that name a model.
FLAGS = (
    *("model", "compare", "base", "src_checkpoint"),
    *(role.flag for role in ROLES.values() if role.flag),
)

Flags = TypeVar("Flags", bound=Any)


def local_models(flags: Flags, weights: bool = True) -> Flags:
    """Replace the ids of models in a command's flags by their folders.

    weights: False for configuration and tokenizer only. Raises UserError.
    """
    given = {name: value for name, value in vars(flags).items() if name in FLAGS and value is not None}
    local = {name: type(value)(local_model(str(value), weights)) for name, value in given.items() if is_id(value)}
    return type(flags)(**vars(flags) | local)


@cache
def local_model(name: str, weights: bool = True) -> str:
    """Find a model's folder: its path, or its id's folder in the hub's cache.

    Files that the cache lacks are downloaded. weights: False for configuration and tokenizer only. Raises UserError.
    """
    if not is_id(name):
        return name
    folder = download(name, "model", (*FILES, *WEIGHTS) if weights else FILES)
    if lacking := _lacking(folder, weights):
        right = f"fetch it whole with {fetch_command(name, 'model')}, or give a model in Hugging Face's format"
        raise UserError(f"{name}: {folder} lacks {lacking}; {right}.")
    return str(folder)


def read_weight_map(index: Path) -> dict[str, str]:
    """Read which file beside an index has each tensor.

    UserError for anything else than names of files there.
    """
    weight_map = read_json(index).get("weight_map", {})
    files = list(weight_map.values()) if isinstance(weight_map, dict) else []
    if not files or not all(isinstance(file, str) for file in files):
        raise UserError(f"{index}: has no weight_map from tensor to file name; get the file again.")
    for file in files:
        if not stays_below(file):
            raise UserError(f"{index}: names {file!r}, which is not a file inside of its folder; do not use it.")
    return weight_map


def _lacking(folder: Path, weights: bool) -> str | None:
    """Name a missing file of a model or an adapter, or None."""
    adapter = (folder / "adapter_config.json").is_file()
    needed = ["adapter_config.json" if adapter else "config.json"]
    if weights:
        index = folder / INDEX
        parts = sorted(set(read_weight_map(index).values())) if index.is_file() else [WHOLE]
        needed += [ADAPTER] if adapter else parts
    return next((file for file in needed if not (folder / file).is_file()), None)
