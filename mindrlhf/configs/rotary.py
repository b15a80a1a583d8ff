"""Scaling of rotary frequencies: Llama 3's, under HF's and MindFormers' keys."""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, model_validator

from mindrlhf.configs.base import Float32, Settings

NO_SCALING, LLAMA3 = "default", "llama3"  # HF's `rope_type`


class Llama3Scaling(Settings):
    """Llama 3's scaling, for contexts longer than the first training's.

    Wavelengths beyond original_max_position_embeddings / low_freq_factor are stretched by `factor`, those below
    original_max_position_embeddings / high_freq_factor stay, and the part between is interpolated.
    """

    factor: Float32 = Field(ge=1.0, description="Stretch of the longest wavelengths.")
    low_freq_factor: Float32 = Field(gt=0.0, description="Full turns of the shortest stretched wavelength.")
    high_freq_factor: Float32 = Field(gt=0.0, description="Full turns of the longest unchanged wavelength.")
    original_max_position_embeddings: int = Field(
        ge=1, description="Longest sequence of the first training, in tokens."
    )

    @model_validator(mode="after")
    def _ordered(self):
        if self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(f"high_freq_factor {self.high_freq_factor} must be above low_freq_factor")
        return self

    def to_hf(self) -> dict[str, Any]:
        """Build the `rope_scaling` of an HF `config.json`."""
        return {"rope_type": LLAMA3, **self.model_dump()}


def _read(value: Any) -> Any:
    """Take the numbers out of HF's or MindFormers' group; a bare number scales nothing."""
    if not isinstance(value, Mapping):
        return None if isinstance(value, int | float) else value
    kind = value.get("rope_type", value.get("type", LLAMA3 if "low_freq_factor" in value else NO_SCALING))
    if kind not in (NO_SCALING, LLAMA3):
        raise ValueError(
            f"rotary scaling {kind!r:.60} is not supported; remove rope_scaling or use '{NO_SCALING}' or '{LLAMA3}'"
        )
    numbers = {key: number for key, number in value.items() if key in Llama3Scaling.model_fields}
    return numbers if kind == LLAMA3 else None


RotaryScaling = Annotated[Llama3Scaling | None, BeforeValidator(_read)]
