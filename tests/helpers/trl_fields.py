"""Fields of TRL's configurations, read from the wheel's source without importing it, which would need torch."""

import ast
from importlib.util import find_spec
from pathlib import Path
from typing import Any

NOT_LITERAL = "computed"


def folder(package: str) -> Path | None:
    """The folder of an installed package, which is not imported."""
    spec = find_spec(package)
    return Path(spec.origin).parent if spec and spec.origin else None


def fields(file: Path, name: str) -> dict[str, Any]:
    """Name -> default of a dataclass' fields; `computed` for a default that is no literal."""
    (found,) = (
        node for node in ast.parse(file.read_text()).body if isinstance(node, ast.ClassDef) and node.name == name
    )
    annotated = [node for node in found.body if isinstance(node, ast.AnnAssign)]
    return {node.target.id: default(node.value) for node in annotated}


def default(value: ast.expr | None) -> Any:
    if isinstance(value, ast.Call):
        value = next((keyword.value for keyword in value.keywords if keyword.arg == "default"), None)
        if value is None:
            return NOT_LITERAL
    try:
        return ast.literal_eval(value)
    except ValueError:
        return NOT_LITERAL


def configurations(trl: Path, transformers: Path) -> dict[str, dict[str, Any]]:
    """Fields of TrainingArguments, and of GRPOConfig and SFTConfig over it."""
    shared = fields(transformers / "training_args.py", "TrainingArguments")
    shared |= fields(trl / "trainer" / "base_config.py", "_BaseConfig")
    own = {"GRPOConfig": "grpo_config.py", "SFTConfig": "sft_config.py"}
    return {"shared": shared, **{name: fields(trl / "trainer" / file, name) for name, file in own.items()}}
