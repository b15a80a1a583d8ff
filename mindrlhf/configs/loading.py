"""Loading of typed settings from YAML files and command-line overrides.

Order of precedence, lowest first: typed defaults, `defaults` from elsewhere (a predict YAML's sampling keys), the YAML
files in the order given (each upon its own `base_config`), dotted overrides.
"""

import json
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from mindrlhf.configs.base import Settings
from mindrlhf.configs.grpo import GRPOConfig
from mindrlhf.configs.layers import merge
from mindrlhf.configs.problems import explain
from mindrlhf.configs.sft import SFTConfig
from mindrlhf.configs.yaml_file import KeyPath, Layer, read_chain
from mindrlhf.errors import UserError

Group = TypeVar("Group", bound=Settings)


def load_grpo_config(
    path: str | Path | None = None, overrides: Sequence[str] = (), defaults: Mapping[str, Any] | None = None
) -> GRPOConfig:
    return load_settings(GRPOConfig, () if path is None else (path,), overrides, defaults)


def load_sft_config(
    path: str | Path | None = None, overrides: Sequence[str] = (), defaults: Mapping[str, Any] | None = None
) -> SFTConfig:
    return load_settings(SFTConfig, () if path is None else (path,), overrides, defaults)


def load_settings(
    settings: type[Group],
    paths: Sequence[str | Path] = (),
    overrides: Sequence[str] = (),
    defaults: Mapping[str, Any] | None = None,
) -> Group:
    """Load typed settings whose every field has a default, from several layers.

    paths: YAML files, later ones winning.
    overrides: `group.key=value` each, values read as YAML.
    defaults: nested mapping laid upon the typed defaults, beneath the files.
    Raises UserError for a file that cannot be read, an unknown key, a wrong type and a value out of range.
    """
    lowest = [Layer(values, {(): "defaults"}) for values in (settings().model_dump(mode="json"), defaults or {})]
    merged = merge((*lowest, *chain.from_iterable(map(read_chain, paths))), overrides)
    return build(settings, merged.values, merged)


def build(
    settings: type[Group],
    values: Mapping[str, Any],
    layer: Layer,
    written: Mapping[str, KeyPath] | None = None,
) -> Group:
    """Validate a nested mapping strictly; only whole numbers become floats, and lists tuples.

    layer: knows the place of each value.
    written: field -> the key path in `layer`, where it is not the field's own name.
    """
    try:
        # JSON mode is pydantic's only strict mode that takes a list for a tuple.
        return settings.model_validate_json(json.dumps(values, default=str), strict=True)
    except ValidationError as error:
        raise UserError(explain(settings, error, values, layer.where, written)) from None
