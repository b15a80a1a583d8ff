"""Names of a run's folders and files. Imports nothing that starts threads."""

import re
from pathlib import Path

DEFAULT_FOLDER = Path("out/ckpt")  # of --save_ckpt_dir
MODEL_FOLDER = "hf"  # of --save_ckpt_dir: the trained model
ADAPTER_FOLDER = "hf_adapter"  # of --save_ckpt_dir: the trained adapter, in PEFT's format
ROLLOUTS_FOLDER = "rollouts"  # of the output folder: responses as JSONL by step
IMAGES_FOLDER = "images"  # of the folder of responses: pictures of prompts, PNG files named by digest
VALIDATION_FOLDER = "validation"  # of the output folder: answers to held-out problems, likewise
TEXT = ".jsonl"

_STEP = re.compile(r"step_(\d{6,})")


def step_path(folder: Path, step: int, suffix: str = "") -> Path:
    """Name a step's file or folder: `<folder>/step_000012<suffix>`."""
    return Path(folder) / f"step_{step:06d}{suffix}"


def step_of(path: Path, suffix: str = "") -> int | None:
    """Parse the step in a path's name; None for another name."""
    match = _STEP.fullmatch(path.name.removesuffix(suffix)) if path.name.endswith(suffix) else None
    return int(match[1]) if match else None


def image_path(folder: Path, digest: str) -> Path:
    """Name a picture's file in a folder of responses."""
    return Path(folder) / IMAGES_FOLDER / f"{digest}.png"


def step_files(folder: Path, suffix: str = TEXT) -> dict[int, Path]:
    """Map steps to their files in a folder, in order; empty without the folder."""
    found = {step_of(path, suffix): path for path in Path(folder).glob(f"step_*{suffix}")}
    return {step: found[step] for step in sorted(step for step in found if step is not None)}
