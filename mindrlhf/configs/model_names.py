"""Names of a model's numbers here, in HF and in MindFormers (`model_names.yaml`)."""

from pathlib import Path

from mindrlhf.configs.yaml_file import read_yaml

_TABLES = read_yaml(Path(__file__).with_suffix(".yaml")).values
_SHAPE = _TABLES["shape"] | _TABLES["experts"]
_NAMES = _SHAPE | _TABLES["others"]

# Field of ModelConfig -> key of an HF config.json.
HF_KEYS = {field: hf for field, (hf, _) in _NAMES.items() if hf and field not in _TABLES["experts"]}
# The same of models with experts alone.
HF_EXPERT_KEYS = {field: hf for field, (hf, _) in _TABLES["experts"].items()}
# Other spelling of such a key in an HF config.json -> the key.
HF_SPELLINGS = _TABLES["hf_spellings"]
# Key of a YAML's model_config -> field of ModelConfig: the numbers that two descriptions of one model must share.
SHAPE_FIELDS = {key: field for field, (_, key) in _SHAPE.items()}
# Other spelling of a key of model_config -> the key.
SPELLINGS = {hf: key for hf, key in _NAMES.values() if hf not in (None, key)} | _TABLES["spellings"]
# MindFormers' path of a linear module within a layer -> its name in Hugging Face's models.
MODULES = _TABLES["modules"]
# The same of MindFormers' newer models, of which one module is several of these.
MCORE_MODULES = _TABLES["mcore_modules"]
# Unsupported kind of model -> keys of model settings that only this kind has.
SIGNS = {kind: keys.split() for kind, keys in _TABLES["unsupported"].items()}
