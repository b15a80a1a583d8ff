"""Keys of MindFormers model YAMLs without effect here, read from `mindformers_keys.yaml`."""

from pathlib import Path

from mindrlhf.configs.yaml_file import read_yaml

_KEYS = read_yaml(Path(__file__).with_suffix(".yaml")).values

MODEL_FIXED = _KEYS["model_fixed"]
MODEL_UNUSED = frozenset(" ".join(_KEYS["model_unused"].values()).split())
MODEL_GROUP_UNUSED, PARALLEL_UNUSED, RECOMPUTE_UNUSED, CONTEXT_UNUSED = (
    frozenset(_KEYS[f"{group}_unused"].split()) for group in ("model_group", "parallel", "recompute", "context")
)
