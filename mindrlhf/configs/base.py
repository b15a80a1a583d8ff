"""Settings base class: frozen, unknown keys refused; and numbers within float32."""

from typing import Annotated, Any

import numpy as np
from pydantic import AfterValidator, BaseModel, ConfigDict

LARGEST, SMALLEST = (float(number) for number in (np.finfo(np.float32).max, np.finfo(np.float32).smallest_normal))


def representable(value: Any) -> Any:
    """Check that float32 has a normal number, and its reciprocal, for a float."""
    if not isinstance(value, float):
        return value
    if abs(value) > LARGEST:
        raise ValueError(f"{value:g} is beyond float32, which graphs compute in; give at most {LARGEST:.2e} in size")
    if 0 < abs(value) < SMALLEST:
        raise ValueError(f"{value:g} is too small for float32, which graphs compute in; give at least {SMALLEST:.2e}")
    return value


Float32 = Annotated[float, AfterValidator(representable)]


class Settings(BaseModel):
    """Group of settings, immutable.

    A key that is not declared is an error, and so are NaN and infinity.
    Every field has a description, as a docstring below it or in its `Field`: its meaning, its unit, and the same
    setting's name in verl and TRL where they have one. The settings reference is generated from it.
    """

    model_config = ConfigDict(
        extra="forbid", frozen=True, protected_namespaces=(), allow_inf_nan=False, use_attribute_docstrings=True
    )

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        """Make each description one line."""
        for field in cls.model_fields.values():
            field.description = field.description and " ".join(field.description.split())
