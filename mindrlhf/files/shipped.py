"""Model YAMLs, presets, recipes and examples that come with the package."""

from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).parents[1]
# A checkout has them alongside the package; setup.py puts them inside of an installed one.
HOME = PACKAGE if (PACKAGE / "examples").is_dir() else PACKAGE.parent
# Beginning of a name -> the folder of its YAML file.
_FOLDERS = {
    "preset:": PACKAGE / "configs" / "presets",
    "recipe:": HOME / "examples" / "recipes",
    "": HOME / "model_configs" / "qwen_grpo",
}


@cache
def shipped_yamls() -> dict[str, Path]:
    """Collect all shipped YAML files by name: `preset:dapo`, `recipe:gsm8k`, a model's without a prefix."""
    files = ((prefix, file) for prefix, folder in _FOLDERS.items() for file in sorted(folder.glob("*.yaml")))
    return {f"{prefix}{file.stem}": file for prefix, file in files}


def names_yaml(text: str | Path) -> bool:
    """Test for a path of a YAML file, or a shipped file's name."""
    return Path(text).suffix in (".yaml", ".yml") or str(text) in shipped_yamls()


def shipped_file(path: Path) -> Path:
    """Return a path, or the shipped file's path if the path is missing.

    Paths of shipped files begin with `examples` or `model_configs`.
    """
    ours = path.parts[:1] in (("examples",), ("model_configs",)) and not path.exists()
    return HOME / path if ours and (HOME / path).exists() else path
