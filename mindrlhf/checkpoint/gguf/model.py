"""Architecture and weights of a GGUF file."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from mindrlhf.checkpoint.finite import fault_of
from mindrlhf.checkpoint.gguf.file import GgufFile
from mindrlhf.checkpoint.gguf.names import (
    ARCHITECTURES,
    EMBEDDING_WEIGHT,
    HEAD_WEIGHT,
    ROTARY_FACTORS,
    WIDTHS,
    halved,
    heads_of,
    is_float32,
    keys_of,
    named_rows,
)
from mindrlhf.checkpoint.stored_tensor import StoredDtype, decode, encode
from mindrlhf.configs.model import Llama3Scaling, ModelConfig
from mindrlhf.configs.problems import brief, build
from mindrlhf.configs.yaml_file import Layer
from mindrlhf.errors import UserError
from mindrlhf.files.text import some
from mindrlhf.models.families import FAMILIES
from mindrlhf.models.parameters import ParameterSpec
from mindrlhf.models.rotary import inverse_frequencies

ARCHITECTURE = "general.architecture"
OPTIONAL = ("num_kv_heads", "head_dim", "rope_theta")  # their defaults are llama.cpp's
TOKENS = "tokenizer.ggml."
ENDS = ("eos_token_id", "eot_token_id", "eom_token_id")
# Llama 3's scaling: its published turns, and lengths of the first training that are tried.
LOW, HIGH = 1.0, 4.0
ORIGINAL = tuple(1 << power for power in range(10, 18))
# Types of matrices -> what stores them without loss; others become float32.
STORED: dict[str, StoredDtype] = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def model_config(file: GgufFile) -> ModelConfig:
    """Read the architecture, with the tokens that end a response. Raises UserError."""
    name = file.metadata.get(ARCHITECTURE)
    if not isinstance(name, str) or name not in ARCHITECTURES:
        found = f"{file.path}: {ARCHITECTURE} is {brief(name)}"
        raise UserError(f"{found}, and {', '.join(ARCHITECTURES)} are read from GGUF files; give one of these.")
    _refuse_parts(file)
    family = FAMILIES[ARCHITECTURES[name]]
    keys = keys_of(family)
    given = {field: file.metadata[key] for field, key in keys.items() if key in file.metadata}
    if lacking := [keys[field] for field in keys if field not in given and field not in OPTIONAL]:
        raise UserError(f"{file.path}: lacks {some(lacking, 3)} in its metadata; get it again.")
    if EMBEDDING_WEIGHT not in file.tensors:
        raise UserError(f"{file.path}: the weight {EMBEDDING_WEIGHT} is missing; give a whole language model.")
    values = {
        "rope_theta": 10000.0,
        **given,
        "family": family.name,
        "vocab_size": file.tensors[EMBEDDING_WEIGHT].shape[0],
        "attention_bias": family.attention_bias,
        "qk_norm": family.qk_norm,
        "norm_topk_prob": family.experts,  # llama.cpp's rule
        "tie_word_embeddings": HEAD_WEIGHT not in file.tensors,
        "eos_token_ids": _ends(file),
        "pad_token_id": file.metadata.get(f"{TOKENS}padding_token_id"),
        "bos_token_id": file.metadata.get(f"{TOKENS}bos_token_id"),
    }
    written = {field: (key,) for field, key in keys.items()}
    config = build(ModelConfig, values, Layer(values, {(): str(file.path)}), written, strict=False)
    _refuse_unsupported(file, config)
    return config.model_copy(update={"rope_scaling": _scaling(file, config)})


def _ends(file: GgufFile) -> tuple[Any, ...]:
    found = (file.metadata.get(f"{TOKENS}{key}") for key in ENDS)
    return tuple(dict.fromkeys(token for token in found if token is not None))


def _refuse_parts(file: GgufFile) -> None:
    count = file.metadata.get("split.count", 1)
    if count != 1:
        raise UserError(f"{file.path}: is one of {count} parts; join them with `llama-gguf-split --merge`.")
    kind = file.metadata.get("general.type", "model")
    if kind != "model":
        raise UserError(f"{file.path}: holds a model's {brief(kind)}, and no model; give the model's file.")


def _refuse_unsupported(file: GgufFile, config: ModelConfig) -> None:
    """Raise UserError for settings of a model that this suite does not compute."""
    family = FAMILIES[config.family]
    prefix = f"{family.gguf}."
    scaling = file.metadata.get(f"{prefix}rope.scaling.type", "none")
    if scaling != "none":
        raise UserError(f"{file.path}: {prefix}rope.scaling.type is {brief(scaling)}, which is not supported.")
    for key in ("attention.sliding_window", *(() if family.experts else ("expert_count",))):
        if file.metadata.get(prefix + key, 0):
            found = f"{file.path}: {prefix}{key} is {brief(file.metadata[prefix + key])}"
            raise UserError(f"{found}, which is not supported; give a dense model with full attention.")
    for key in WIDTHS:
        if file.metadata.get(prefix + key, config.head_dim) != config.head_dim:
            found = f"{file.path}: {prefix}{key} is {brief(file.metadata[prefix + key])}"
            raise UserError(f"{found}, and heads have {config.head_dim} numbers; give a model with one width of heads.")


def rotary_factors(config: ModelConfig) -> np.ndarray:
    """Compute the divisors of the rotary frequencies: float32[head_dim / 2]."""
    plain = inverse_frequencies(config.model_copy(update={"rope_scaling": None}))
    return (plain / inverse_frequencies(config)).astype(np.float32)


def _scaling(file: GgufFile, config: ModelConfig) -> Llama3Scaling | None:
    """Find Llama 3's scaling by the file's divisors of the rotary frequencies."""
    if ROTARY_FACTORS not in file.tensors:
        return None
    factors = file.read(ROTARY_FACTORS)
    if factors.shape == (config.head_dim // 2,) and np.isfinite(factors).all() and factors.max() >= 1.0:
        largest = float(str(factors.max()))
        for original in ORIGINAL:
            numbers = {"factor": largest, "low_freq_factor": LOW, "high_freq_factor": HIGH}
            scaling = Llama3Scaling(**numbers, original_max_position_embeddings=original)
            scaled = config.model_copy(update={"rope_scaling": scaling})
            if np.allclose(rotary_factors(scaled), factors, rtol=1e-4, atol=0):
                return scaling
    raise UserError(f"{file.path}: {ROTARY_FACTORS} is not Llama 3's scaling, the only one that is supported.")


def check_weights(file: GgufFile, config: ModelConfig) -> dict[str, ParameterSpec]:
    """Check that a file has exactly the model's weights, in their shapes.

    Returns the rows of the table by GGUF's names. Raises UserError.
    """
    rows = dict(named_rows(config, str(file.path)))
    missing = [name for name in rows if name not in file.tensors]
    further = [name for name in file.tensors if name not in rows and name != ROTARY_FACTORS]
    if missing or further:
        verb, names = ("lacks", missing) if missing else ("holds", further)
        found = f"{file.path}: {verb} {some(names)}, and a {config.family} model of {config.num_layers} layers has"
        raise UserError(f"{found} {'it' if missing else 'no such weight'}; get a whole model of this family.")
    for name, spec in rows.items():
        if file.tensors[name].shape != spec.shape:
            found = f"{file.path}: {name} has shape {list(file.tensors[name].shape)}"
            raise UserError(f"{found}, and its metadata ask for {list(spec.shape)}; get it again.")
    return rows


def read_weights(file: GgufFile, config: ModelConfig) -> Iterator[tuple[ParameterSpec, np.ndarray]]:
    """Yield (row, float32 array) in the order of the table.

    Raises UserError for numbers of no trained model.
    """
    for name, spec in check_weights(file, config).items():
        array = file.read(name)
        if fault := fault_of(array):
            raise UserError(f"{file.path}: tensor {name} holds {fault}; get the file again.")
        heads = heads_of(spec, config)
        yield spec, array if heads is None else halved(array, heads)


def stored_dtype(file: GgufFile, config: ModelConfig) -> StoredDtype:
    """Choose the narrowest dtype that stores all weights without loss."""
    rows = check_weights(file, config)
    types = {file.tensors[name].type.name for name, spec in rows.items() if not is_float32(spec)}
    dtype = STORED.get(next(iter(types)), "float32") if len(types) == 1 else "float32"
    others = [name for name, spec in rows.items() if is_float32(spec)]
    if dtype != "float32" and not all(_fits(file.read(name), dtype) for name in others):
        return "float32"
    return dtype


def _fits(array: np.ndarray, dtype: StoredDtype) -> bool:
    """Test that a dtype stores numbers exactly."""
    if dtype == "float16" and np.abs(array).max(initial=0.0) > np.finfo(np.float16).max:
        return False
    return np.array_equal(decode(encode(array, dtype, ""), dtype), array)
