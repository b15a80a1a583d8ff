"""YAMLs of MindFormers' PyNative trainer, in the form of those before.

Their layout is the group `parallelism`, and the model's keys are in `model` itself. Everything else of this suite reads
`parallel_config`, `parallel`, `model.model_config` and `recompute_config`: messages name these, with the line of the
file, and settings in this form win.
"""

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mindrlhf.configs.problems import brief, unknown_name
from mindrlhf.configs.yaml_file import KeyPath, Layer, dotted, read_yaml
from mindrlhf.errors import UserError

GROUP = "parallelism"
_KEYS = read_yaml(Path(__file__).with_name("pynative_keys.yaml")).values
AXES: Mapping[str, str] = _KEYS["axes"]
STRATEGIES: Mapping[str, str] = _KEYS["strategies"]
HSDP_LEVELS: Mapping[str, str] = _KEYS["hsdp_levels"]
UNUSED = frozenset(_KEYS["unused"].split())
SHARD, STRATEGY, LAYERS = "data_parallel_shard", "data_parallel_shard_strategy", "pipeline_parallel_layers_per_stage"
SEQUENCE = "sequence_parallel"
HSDP_SIZE, HSDP_LEVEL = "hsdp_shard_size", "hsdp_optimizer_level"  # of MindFormers 1.9
OWN = (*AXES, SHARD, STRATEGY, LAYERS, SEQUENCE, HSDP_SIZE, HSDP_LEVEL)
LEVEL: KeyPath = ("parallel", "parallel_optimizer_config", "optimizer_level")


@dataclass
class _Form:
    """Settings in the other form, with the places of the file."""

    layer: Layer
    values: dict[str, Any] = field(default_factory=dict)
    places: dict[KeyPath, str] = field(default_factory=dict)

    def set(self, target: KeyPath, value: Any, source: KeyPath) -> None:
        """Set a value from `source` in the file.

        A value that is given in the first form stays.
        """
        group = self.values
        for part in target[:-1]:
            group = group.setdefault(part, {})
        if target[-1] not in group:
            group[target[-1]] = value
            self.places[target] = self.layer.where(source)

    def refuse(self, path: KeyPath, words: str) -> UserError:
        return UserError(f"{self.layer.where(path)}: {words}")


def is_second_form(values: Mapping[str, Any]) -> bool:
    """Tell whether a YAML is one of MindFormers' PyNative trainer."""
    return GROUP in values


def in_first_form(layer: Layer) -> tuple[Layer, list[str], bool]:
    """Translate a YAML of MindFormers' PyNative trainer.

    Another one is returned as it is. Returns the settings, the keys of `parallelism` without effect, and True if all
    ranks that nothing else takes are data-parallel. Raises UserError.
    """
    if not is_second_form(layer.values):
        return layer, [], False
    form = _Form(layer, places={(): layer.where(())})
    translators: Mapping[str, Callable[[_Form, Any], None]] = {
        "model": _model,
        "recompute": _recompute,
        "context": _context,
    }
    translated = {key for key, value in layer.values.items() if key in translators and isinstance(value, Mapping)}
    for key, value in layer.values.items():
        if key not in (*translated, GROUP):
            form.values[key] = deepcopy(value)
            form.places |= {path: place for path, place in layer.places.items() if path[:1] == (key,)}
    for key in translated:
        translators[key](form, layer.values[key])
    given = layer.values[GROUP] or {}
    if not isinstance(given, Mapping):
        raise form.refuse((GROUP,), f"{GROUP} is {brief(given)}, and must be a group of keys.")
    unused = _parallelism(form, given)
    return Layer(form.values, form.places), unused, True


def _model(form: _Form, model: Mapping[str, Any]) -> None:
    for key, value in model.items():
        target: KeyPath = ("model", key) if key == "model_config" else ("model", "model_config", key)
        form.set(target, value, ("model", key))


def _recompute(form: _Form, given: Mapping[str, Any]) -> None:
    for key, value in given.items():
        if key == "mode":
            form.set(("recompute_config", "recompute"), str(value) in ("full", "select"), ("recompute", key))


def _context(form: _Form, given: Mapping[str, Any]) -> None:
    """Take a context without its mode, which is that of another program."""
    for key, value in given.items():
        if key != "mode":
            form.set(("context", key), value, ("context", key))


def _parallelism(form: _Form, given: Mapping[str, Any]) -> list[str]:
    """Translate the layout; returns keys without effect."""
    unused = []
    stages = given.get("pipeline_parallel") or 1
    for key, value in given.items():
        place = (GROUP, key)
        if key in AXES:
            if value is not None:
                form.set(("parallel_config", AXES[key]), value, place)
        elif key == SEQUENCE:
            # With one tensor-parallel rank there are no rows to split; files have it all the same.
            if (given.get("tensor_parallel") or 1) != 1:
                form.set(("parallel_config", "use_seq_parallel"), value, place)
        elif key == LAYERS:
            if value not in (None, "auto"):
                right = "remove it, and give model.offset, the layers more or fewer than the even share by stage"
                found = f"{dotted(place)} is {brief(value)}, which this suite does not read"
                raise form.refuse(place, f"{found}; {right}.")
        elif key == SHARD:
            # Replicas are told from the number of ranks; all of them share, which changes no number.
            if value not in (None, -1):
                unused.append(dotted(place))
        elif key in UNUSED:
            unused.append(dotted(place))
        elif key not in (STRATEGY, HSDP_SIZE, HSDP_LEVEL):
            raise form.refuse(place, unknown_name(key, OWN, GROUP, UNUSED))
    if HSDP_SIZE not in given and HSDP_LEVEL not in given:
        _strategy(form, STRATEGY, given.get(STRATEGY, next(iter(STRATEGIES))), stages)
    elif (given.get(HSDP_SIZE) or 1) != 1:
        _strategy(form, HSDP_LEVEL, given.get(HSDP_LEVEL, next(iter(HSDP_LEVELS))), stages)
    return unused


def _strategy(form: _Form, key: str, value: Any, stages: Any) -> None:
    """Translate what data-parallel ranks share; stages keep their weights."""
    place = (GROUP, key)
    levels = STRATEGIES if key == STRATEGY else HSDP_LEVELS
    if value not in levels:
        raise form.refuse(place, f"{dotted(place)} is {brief(value)}, and must be one of {', '.join(levels)}.")
    form.set(("parallel", "enable_parallel_optimizer"), True, place)
    form.set(LEVEL, levels[value] if stages == 1 else "level1", place)
