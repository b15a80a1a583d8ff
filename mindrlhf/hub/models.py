"""Models of a hub, as local folders."""

from pathlib import Path

from mindrlhf.configs.images import PREPROCESSOR_FILE, PROCESSOR_FILE
from mindrlhf.errors import UserError
from mindrlhf.files.atomic import stays_below
from mindrlhf.files.json import read_json
from mindrlhf.hub.download import download, fetch_command

INDEX = "model.safetensors.index.json"
WHOLE = "model.safetensors"
ADAPTER = "adapter_model.safetensors"
# Files of a model's description, its tokenizer and its preparation of images, and files of its weights.
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
    PREPROCESSOR_FILE,
    PROCESSOR_FILE,
)
WEIGHTS = (WHOLE, "model-*.safetensors", INDEX, ADAPTER)


def hub_folder(name: str, weights: bool = True) -> str:
    """Find the folder of a model's id in the hub's cache.

    Files that the cache lacks are downloaded. weights: False for configuration and tokenizer only. Raises UserError.
    """
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
