"""Base class of settings (frozen, unknown keys refused), and numbers within float32."""

from typing import Annotated, Any, Literal

import numpy as np
from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from pydantic.fields import FieldInfo

LARGEST, SMALLEST = (float(number) for number in (np.finfo(np.float32).max, np.finfo(np.float32).smallest_normal))


def representable(value: Any) -> Any:
    """Check that a nonzero float and its reciprocal are within float32's range."""
    if isinstance(value, float) and value and not SMALLEST <= abs(value) <= LARGEST:
        right = f"give at most {LARGEST:.2e} in size, and at least {SMALLEST:.2e} or 0"
        raise ValueError(f"{value:g} is beyond float32, which graphs compute in; {right}")
    return value


Float32 = Annotated[float, AfterValidator(representable)]

DeviceTarget = Literal["CPU", "Ascend"]  # names of `backend.devices`
BOUNDS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}  # of pydantic's constraints


class Settings(BaseModel):
    """Group of settings, immutable.

    A key that is not declared is an error, and so are NaN and infinity.
    Every field has a description, as a docstring below it or in its `Field`: its meaning, its unit, and the setting's
    name in verl and TRL, if any. A group is described by its docstring. The settings reference is generated from these.
    """

    model_config = ConfigDict(
        extra="forbid", frozen=True, protected_namespaces=(), allow_inf_nan=False, use_attribute_docstrings=True
    )

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        """Make each description one line; a group's description is its docstring."""
        for field in cls.model_fields.values():
            text = field.description or (is_group(field.annotation) and field.annotation.__doc__) or ""
            field.description = " ".join(text.partition("\n\n")[0].split())


def optional(field: FieldInfo) -> tuple[Any, FieldInfo]:
    """Copy a setting for `create_model`, null by default."""
    bounds = {sign: getattr(rule, sign) for rule in field.metadata for sign in BOUNDS if hasattr(rule, sign)}
    annotation = Float32 if field.annotation is float else field.annotation
    return annotation | None, Field(None, description=field.description, **bounds)


def is_group(annotation: Any) -> bool:
    """Tell whether an annotation is a group of settings."""
    return isinstance(annotation, type) and issubclass(annotation, Settings)
