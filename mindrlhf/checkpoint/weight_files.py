"""Weight files of a path, and the tensors in them by name."""

from pathlib import Path

from mindrlhf.checkpoint.ckpt_file import index_ckpt
from mindrlhf.checkpoint.safetensors_file import index_safetensors
from mindrlhf.checkpoint.stored_tensor import StoredTensor
from mindrlhf.errors import UserError
from mindrlhf.files.atomic import stays_below
from mindrlhf.files.json import read_json

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


def index_weights(path: Path) -> dict[str, StoredTensor]:
    """Index all tensors of a path by name, from headers alone.

    A path is a `.safetensors` or `.ckpt` file, or a folder with (the first that is there) `model.safetensors`, a
    sharded checkpoint with its index, any `.safetensors` files with distinct tensors, one `.ckpt`, or one `rank_*`
    folder of these. Hidden files (unfinished writing) are not seen. Raises `UserError` for anything else and for
    damaged files.
    """
    if not path.exists():
        raise UserError(f"{path}: the path does not exist; give a model folder, a .safetensors or a .ckpt file.")
    if path.is_dir():
        return _index_folder(path)
    if path.suffix == ".safetensors":
        return index_safetensors(path)
    if path.suffix == ".ckpt":
        return index_ckpt(path)
    raise UserError(f"{path}: not a weight file; give a model folder, a .safetensors or a .ckpt file.")


def _index_folder(folder: Path) -> dict[str, StoredTensor]:
    if (folder / SINGLE_FILE).exists():
        return index_safetensors(folder / SINGLE_FILE)
    if (folder / INDEX_FILE).exists():
        return _index_shards(folder / INDEX_FILE)
    if files := _visible(folder, "*.safetensors"):
        return _index_together(files)
    if checkpoints := _visible(folder, "*.ckpt"):
        if len(checkpoints) > 1:
            raise UserError(f"{folder}: holds {len(checkpoints)} .ckpt files; give the path of one of them.")
        return index_ckpt(checkpoints[0])
    if ranks := _visible(folder, "rank_*"):
        if len(ranks) > 1:
            raise UserError(f"{folder}: holds the shards of {len(ranks)} ranks; use tools/transform_checkpoint.py.")
        return index_weights(ranks[0])
    hint = " (PyTorch .bin files have to be converted to safetensors first)" if _visible(folder, "*.bin") else ""
    raise UserError(f"{folder}: holds no .safetensors and no .ckpt file{hint}; give the folder with the weights.")


def _index_shards(index_file: Path) -> dict[str, StoredTensor]:
    weight_map = read_json(index_file).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise UserError(f"{index_file}: has no weight_map from tensor to file name; get the file again.")
    shards = {}
    for shard in sorted(set(weight_map.values())):
        if not stays_below(shard):
            raise UserError(f"{index_file}: names {shard!r}, which is not a file inside of its folder; do not use it.")
        if not (index_file.parent / shard).is_file():
            raise UserError(f"{index_file}: names {shard}, and that file is not beside it; get the missing shard.")
        shards[shard] = index_safetensors(index_file.parent / shard)
    for name, shard in weight_map.items():
        if name not in shards[shard]:
            raise UserError(f"{index_file}: says that {name} is in {shard}, and it is not; get both files again.")
    return {name: shards[shard][name] for name, shard in weight_map.items()}


def _index_together(files: list[Path]) -> dict[str, StoredTensor]:
    """Index several files without an index file; each tensor must be unique."""
    tensors: dict[str, StoredTensor] = {}
    for file in files:
        found = index_safetensors(file)
        for name in found.keys() & tensors.keys():
            raise UserError(f"{file.parent}: {name} is in both {tensors[name].file.name} and {file.name}; give one.")
        tensors |= found
    return tensors


def _visible(folder: Path, pattern: str) -> list[Path]:
    return sorted(path for path in folder.glob(pattern) if not path.name.startswith("."))
