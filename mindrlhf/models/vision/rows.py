"""Rows of the parameter table of a model that sees. Imports no family."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from mindrlhf.configs.vision import PartName
from mindrlhf.models.parameter_spec import Kind, ParameterSpec

TOWER = "model.visual."
"""Beginning of our names of the tower's parameters; transformers 5 has them so in memory."""
HF_TOWER = "visual."
PATCHES, BLOCK, MERGER = "patch_embed.proj", "blocks.{}.", "merger."
HF_PATCHES = f"{HF_TOWER}{PATCHES}.weight"

# Beginning of names in released checkpoints -> in memory of transformers, as PEFT and some other tools write them.
RENAMED = {HF_TOWER: TOWER, "model.": "model.language_model."}


def is_tower(spec: ParameterSpec) -> bool:
    """Test for a parameter of the vision tower."""
    return spec.name.startswith(TOWER)


def part_of(spec: ParameterSpec) -> PartName:
    """Name the part of a model that sees with a parameter."""
    if not is_tower(spec):
        return "text"
    return "merger" if spec.name.startswith(f"{TOWER}{MERGER}") else "vision"


def model_rows(model: Any, rows: list[ParameterSpec]) -> list[ParameterSpec]:
    """Put the tower's rows before the text's, for `Family.model_rows`.

    All rows have a second name that is read and not written.
    """
    return [replace(row, joint=(row.as_tensor(in_memory(row.hf_name)),)) for row in (*tower_rows(model), *rows)]


def tower_rows(model: Any) -> Iterator[ParameterSpec]:
    """List the tower's parameters under the names of released checkpoints.

    Every rank of the first pipeline stage holds the whole tower, and computes its whole gradient.
    """
    vision = model.vision
    wide = vision.hidden_size
    inner = vision.intermediate_size
    merged = wide * vision.merge_size**2
    yield _row(f"{PATCHES}.weight", "matrix", wide, *vision.patch_shape)
    for block in map(BLOCK.format, range(vision.depth)):
        yield _row(f"{block}norm1.weight", "norm", wide)
        yield from _linear(f"{block}attn.qkv", 3 * wide, wide)
        yield from _linear(f"{block}attn.proj", wide, wide)
        yield _row(f"{block}norm2.weight", "norm", wide)
        yield from _linear(f"{block}mlp.gate_proj", inner, wide)
        yield from _linear(f"{block}mlp.up_proj", inner, wide)
        yield from _linear(f"{block}mlp.down_proj", wide, inner)
    yield _row(f"{MERGER}ln_q.weight", "norm", wide)
    yield from _linear(f"{MERGER}mlp.0", merged, merged)
    yield from _linear(f"{MERGER}mlp.2", model.hidden_size, merged)


def _linear(name: str, outputs: int, inputs: int) -> Iterator[ParameterSpec]:
    yield _row(f"{name}.weight", "matrix", outputs, inputs)
    yield _row(f"{name}.bias", "bias", outputs)


def _row(name: str, kind: Kind, *shape: int) -> ParameterSpec:
    return ParameterSpec(TOWER + name, HF_TOWER + name, shape, kind, "first", inside=False)


def in_memory(name: str) -> str:
    """Return a released checkpoint's name as transformers has it in memory."""
    before = next((one for one in RENAMED if name.startswith(one)), "")
    return RENAMED.get(before, "") + name.removeprefix(before)


def released(name: str) -> str:
    """Return a name of transformers' memory as released checkpoints have it."""
    before = next((one for one, other in RENAMED.items() if name.startswith(other)), None)
    return name if before is None else before + name.removeprefix(RENAMED[before])
