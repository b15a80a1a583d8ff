"""Loading of typed settings from YAML files and command-line overrides.

Order of precedence, lowest first: typed defaults, `defaults` from elsewhere (a predict YAML's sampling keys), the YAML
file's `base_config`, the YAML file, settings of a calling program, dotted overrides. An option that the method chosen
above it does not have falls away.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from mindrlhf.configs.choices import without_void
from mindrlhf.configs.grpo import GRPOSettings
from mindrlhf.configs.layers import merge
from mindrlhf.configs.problems import Group, OtherNames, build
from mindrlhf.configs.sft import SFTSettings
from mindrlhf.configs.yaml_file import Layer, read_chain


def load_settings(
    settings: type[Group],
    path: str | Path | None = None,
    overrides: Sequence[str] = (),
    defaults: Mapping[str, Any] | None = None,
    given: Layer | None = None,
    other_names: OtherNames | None = None,
) -> Group:
    """Load typed settings whose every field has a default, from several layers.

    path: a YAML file, merged over its own `base_config`.
    overrides: `group.key=value` each, values read as YAML.
    defaults: nested mapping, merged over the typed defaults and under the files.
    given: settings of a calling program, merged between file and overrides.
    other_names: explains keys that are another suite's.
    Raises UserError for a file that cannot be read, an unknown key, a wrong type and a value out of range.
    """
    lowest = [Layer(values, {(): "defaults"}) for values in (settings().model_dump(mode="json"), defaults or {})]
    upper = [*(() if path is None else read_chain(path)), *(() if given is None else (given,))]
    chosen = merge((), overrides)  # on the command line
    *layers, _ = without_void((*lowest, *upper, chosen))
    merged = merge(layers, overrides)
    return build(settings, merged.values, merged, other_names=other_names)


load_grpo_config = partial(load_settings, GRPOSettings)
load_sft_config = partial(load_settings, SFTSettings)
