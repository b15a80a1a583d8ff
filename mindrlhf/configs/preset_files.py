"""Shipped algorithms as YAML files, named `preset:NAME`.

The name stands wherever a file of GRPO settings is read.
"""

from pathlib import Path

from mindrlhf.algorithms.methods import unknown_name

PREFIX = "preset:"
FOLDER = Path(__file__).parent / "presets"


def preset_names() -> tuple[str, ...]:
    """List the names after `preset:`, sorted."""
    return tuple(sorted(file.stem for file in FOLDER.glob("*.yaml")))


def is_preset(text: str) -> bool:
    """Test that a text is `preset:NAME` and no path."""
    return text.startswith(PREFIX)


def preset_file(text: str) -> Path:
    """Find the file of `preset:NAME`. Raises UserError for an unknown name."""
    name = text.removeprefix(PREFIX)
    if name not in preset_names():
        raise unknown_name("preset", name, preset_names())
    return FOLDER / f"{name}.yaml"
