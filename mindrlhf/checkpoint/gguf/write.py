"""Models and adapters as GGUF files, which llama.cpp and ollama read."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGML_QUANT_VERSION, GGMLQuantizationType, LlamaFileType
from gguf.gguf_writer import GGUFWriter
from gguf.quants import quant_shape_to_byte_shape, quantize

from mindrlhf.checkpoint.gguf.model import STORED, rotary_factors
from mindrlhf.checkpoint.gguf.names import (
    ROTARY_FACTORS,
    WIDTHS,
    alternated,
    architecture_of,
    gguf_name,
    heads_of,
    is_float32,
    is_table,
    keys_of,
    named_rows,
)
from mindrlhf.checkpoint.hf_tensors import joined
from mindrlhf.checkpoint.stored_tensor import encode
from mindrlhf.configs.model import ModelConfig
from mindrlhf.errors import UserError
from mindrlhf.files.atomic import atomic_file
from mindrlhf.models.families import FAMILIES
from mindrlhf.models.parameters import ParameterSpec, adapter_rows

FLOAT32, FLOAT16 = GGMLQuantizationType.F32, GGMLQuantizationType.F16


@dataclass(frozen=True)
class FileType:
    """Type of a GGUF file.

    matrices: type of the layers' matrices. tables: of embedding and head. number: the format's, of the whole.
    """

    matrices: GGMLQuantizationType
    tables: GGMLQuantizationType
    number: LlamaFileType

    def of(self, spec: ParameterSpec) -> GGMLQuantizationType:
        """Choose the type of a weight.

        It is float32 for vectors and routers, and float16 for rows that blocks do not fill.
        """
        if is_float32(spec):
            return FLOAT32
        chosen = self.tables if is_table(spec) else self.matrices
        return FLOAT16 if spec.shape[-1] % GGML_QUANT_SIZES[chosen][0] else chosen


def _file_type(name: str, number: LlamaFileType, tables: str | None = None) -> FileType:
    return FileType(GGMLQuantizationType[name], GGMLQuantizationType[tables or name], number)


# The first is the default.
FILE_TYPES: Mapping[str, FileType] = {
    "f16": _file_type("F16", LlamaFileType.MOSTLY_F16),
    "bf16": _file_type("BF16", LlamaFileType.MOSTLY_BF16),
    "f32": _file_type("F32", LlamaFileType.ALL_F32),
    "q8_0": _file_type("Q8_0", LlamaFileType.MOSTLY_Q8_0),
    "q4_0": _file_type("Q4_0", LlamaFileType.MOSTLY_Q4_0, tables="Q8_0"),
}

Part = tuple[str, np.ndarray, GGMLQuantizationType]


def write_model(
    path: Path,
    config: ModelConfig,
    tensors: Iterable[tuple[ParameterSpec, np.ndarray]],
    file_type: FileType,
    tokenizer: Mapping[str, Any],
    name: str,
) -> None:
    """Write a model as a GGUF file, one tensor at a time.

    The file appears complete or not at all.
    tensors: (spec, float32 array) in the order of the table. tokenizer: its metadata. name: of the model. Raises
    UserError for a model without names in GGUF files, and for numbers beyond float16.
    """
    architecture = architecture_of(config, str(path))
    rows = named_rows(config, str(path))
    factors = [(ROTARY_FACTORS, (config.head_dim // 2,), FLOAT32)] if config.rope_scaling else []
    layout = [*factors, *((key, spec.shape, file_type.of(spec)) for key, spec in rows.items())]
    metadata = {
        "general.type": "model",
        "general.name": name,
        "general.file_type": int(file_type.number),
        "general.quantization_version": GGML_QUANT_VERSION,
        **{key: getattr(config, field) for field, key in keys_of(FAMILIES[config.family]).items()},
        **{f"{architecture}.{key}": config.head_dim for key in WIDTHS},
        f"{architecture}.vocab_size": config.vocab_size,
        **tokenizer,
    }

    def parts() -> Iterator[np.ndarray]:
        if factors:
            yield rotary_factors(config)
        for (_, expected), (spec, array) in zip(rows.items(), tensors, strict=True):
            if spec.name != expected.name:
                raise ValueError(f"{spec.name} was given where {expected.name} is due")
            heads = heads_of(spec, config)
            yield array if heads is None else alternated(array, heads)

    _write(path, architecture, metadata, layout, parts())


def write_adapter(path: Path, config: ModelConfig, arrays: Mapping[str, np.ndarray], name: str) -> None:
    """Write low-rank adapters as a GGUF file, in float32.

    config: with the adapters. arrays: by Hugging Face's names, as in PEFT's format. llama.cpp has one alpha for all
    modules: another factor of a module goes into its matrix B.
    """
    rows = adapter_rows(config).values()
    ranks = {spec.hf_tensors[0].module: spec.shape[-2] for spec in rows if spec.kind == "lora_a"}
    alphas = {spec.hf_tensors[0].module: spec.scale * ranks[spec.hf_tensors[0].module] for spec in rows}
    alpha = next(iter(alphas.values()))
    names = {spec.hf_name: gguf_name(spec.hf_name) for spec in rows}
    if lost := [name for name, found in names.items() if found is None]:
        raise UserError(f"{path}: {lost[0]} has no name in a GGUF file; merge the adapter with --merge.")
    metadata = {"general.type": "adapter", "general.name": name, "adapter.type": "lora", "adapter.lora.alpha": alpha}

    def parts() -> Iterator[np.ndarray]:
        for spec in rows:
            array = joined(spec, arrays)
            if spec.kind == "lora_b":
                array = array * np.float32(alphas[spec.hf_tensors[0].module] / alpha)
            heads = heads_of(spec, config)
            yield array if heads is None else alternated(array, heads)

    layout = [(names[spec.hf_name], spec.shape, FLOAT32) for spec in rows]
    _write(path, architecture_of(config, str(path)), metadata, layout, parts())


def _write(
    path: Path,
    architecture: str,
    metadata: Mapping[str, Any],
    layout: Iterable[tuple[str, tuple[int, ...], GGMLQuantizationType]],
    arrays: Iterable[np.ndarray],
) -> None:
    """Write metadata and tensors (name, shape, type), one array at a time."""
    layout = list(layout)
    with atomic_file(path) as temporary, closing(GGUFWriter(temporary, architecture)) as writer:
        for key, value in metadata.items():
            _add_value(writer, key, value)
        for name, shape, kind in layout:
            stored = quant_shape_to_byte_shape(shape, kind)
            writer.add_tensor_info(name, stored, np.dtype(np.uint8), prod(stored), kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for (name, _, kind), array in zip(layout, arrays, strict=True):
            writer.write_tensor_data(_packed(array, kind, name))


def _add_value(writer: GGUFWriter, key: str, value: Any) -> None:
    """Add a value of metadata in the type that llama.cpp reads."""
    if isinstance(value, list):
        writer.add_array(key, value)
    elif isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    else:
        writer.add_string(key, value)


def _packed(array: np.ndarray, kind: GGMLQuantizationType, name: str) -> np.ndarray:
    """Round a float32 array to the blocks of a type: uint8[..., bytes]."""
    array = np.ascontiguousarray(array, np.float32)
    if kind.name in STORED:
        return encode(array, STORED[kind.name], name).view(np.uint8)
    return quantize(array, kind)
