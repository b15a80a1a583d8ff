"""Shipped algorithms as YAML files, named `preset:NAME` wherever settings are read."""

from pathlib import Path

from mindrlhf.algorithms.methods import unknown_name

PREFIX = "preset:"
FOLDER = Path(__file__).parent / "presets"


def preset_names() -> tuple[str, ...]:
    """List the names after `preset:`, sorted."""
    return tuple(sorted(file.stem for file in FOLDER.glob("*.yaml")))


def file_of(text: str, folder: Path = Path()) -> Path:
    """Find the file of `preset:NAME`, or of a path relative to `folder`. Raises UserError."""
    if not text.startswith(PREFIX):
        return folder / text
    name = text.removeprefix(PREFIX)
    if name not in preset_names():
        raise unknown_name("preset", name, preset_names())
    return FOLDER / f"{name}.yaml"
