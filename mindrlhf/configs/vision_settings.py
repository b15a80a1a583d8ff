"""`model.model_config.vision_config` of a model YAML: a vision tower."""

from collections.abc import Iterator
from typing import Any

from pydantic import create_model

from mindrlhf.configs.base import Settings, optional
from mindrlhf.configs.problems import build
from mindrlhf.configs.vision import SECTIONS, TOWER_GROUP, TOWER_KEYS, VisionConfig
from mindrlhf.configs.yaml_file import Layer

# Field of VisionConfig -> key of the group.
KEYS = TOWER_KEYS | {"sections": SECTIONS}
# Fields that a YAML without a checkpoint must give: the released models differ in them, or have no default.
NEEDED = ("depth", "hidden_size", "intermediate_size", "num_heads", "full_attention_blocks", "sections")

_NUMBERS = create_model(
    "VisionNumbers",
    __base__=Settings,
    __doc__="Numbers of a vision tower.",
    **{key: optional(VisionConfig.model_fields[field]) for field, key in KEYS.items()},
)


class VisionSettings(_NUMBERS):
    """Vision tower under HF's names, and the text's rotary sections."""

    @property
    def given(self) -> dict[str, Any]:
        """Values that the YAML sets, by fields of `VisionConfig`."""
        values = {field: getattr(self, key) for field, key in KEYS.items()}
        return {field: value for field, value in values.items() if value is not None}

    def missing(self) -> Iterator[str]:
        """List keys that a YAML without a checkpoint lacks, with their group."""
        given = self.given
        return (f"{TOWER_GROUP}.{KEYS[field]}" for field in NEEDED if field not in given)

    def tower(self, where: str) -> VisionConfig:
        """Build the tower's configuration, with the released models' tokens. Raises UserError."""
        values = self.given
        keys = {field: (TOWER_GROUP, key) for field, key in KEYS.items()}
        return build(VisionConfig, values, Layer(values, {(): where}), keys, strict=False)


def tower_shape(vision: VisionConfig | None) -> dict[str, Any]:
    """List the numbers that descriptions of one tower share, by YAML key."""
    return {f"{TOWER_GROUP}.{key}": getattr(vision, field) for field, key in KEYS.items()} if vision else {}
