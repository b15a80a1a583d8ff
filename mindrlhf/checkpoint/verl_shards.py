"""Checkpoints of verl, whose shards torch reads.

They are recognised by their files; the answer is verl's merge command.
"""

import re
import shlex
from pathlib import Path

from mindrlhf.errors import UserError

STEP = re.compile(r"global_step_(\d+)")
HF = "huggingface"  # verl's folder of the configuration, and of whole weights if they were asked for
# verl's backend -> pattern of a file or folder in its checkpoints.
BACKENDS = {"fsdp": "model_world_size_*_rank_*.pt", "megatron": "dist_ckpt"}


def refuse_verl_shards(path: str | Path) -> None:
    """Raise UserError for a folder of verl's shards, with the command that merges them.

    path: a run's folder, its `global_step_N`, `actor` in it, `huggingface` or a shard in that. Whole weights pass.
    """
    given = Path(path).parent if Path(path).match(BACKENDS["fsdp"]) else Path(path)
    if any(given.glob("*.safetensors")):
        return
    for folder in (given, given / "actor", *_newest(given), *([given.parent] if given.name == HF else ())):
        backend = next((name for name, pattern in BACKENDS.items() if any(folder.glob(pattern))), None)
        if backend is None:
            continue
        found = f"{path}: holds shards of verl's {backend} backend, which torch reads"
        if any((folder / HF).glob("*.safetensors")):
            raise UserError(f"{found}; give {folder / HF}, which has the whole weights.")
        target = folder / "merged"
        words = ["--backend", backend, "--local_dir", str(folder), "--target_dir", str(target)]
        command = f"python -m verl.model_merger merge {shlex.join(words)}"
        raise UserError(f"{found}; merge them where verl is installed (`{command}`), and give {target}.")


def _newest(folder: Path) -> list[Path]:
    """List the actor's folder of a run's newest step, if there is one."""
    steps = {int(match[1]): path for path in folder.glob("global_step_*") if (match := STEP.fullmatch(path.name))}
    return [steps[max(steps)] / "actor"] if steps else []
