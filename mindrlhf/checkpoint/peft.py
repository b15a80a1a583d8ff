"""PEFT's adapter folders: `adapter_config.json` and `adapter_model.safetensors`.

Folders written here load in `peft`, `transformers` and vLLM; their folders load here if they are plain LoRA.
"""

import hashlib
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from mindrlhf.checkpoint.finite import fault_of
from mindrlhf.checkpoint.hf import check_replaceable
from mindrlhf.checkpoint.local import local_model
from mindrlhf.checkpoint.manifest import describe
from mindrlhf.checkpoint.peft_config import OWN_FILE, PEFT_CONFIG_FILE, Base, own_facts, peft_config, read_peft_config
from mindrlhf.checkpoint.safetensors_file import index_safetensors, write_safetensors
from mindrlhf.checkpoint.stored_tensor import StoredTensor
from mindrlhf.configs.lora import Adapter, LoraSettings
from mindrlhf.configs.model import ModelConfig
from mindrlhf.configs.problems import brief
from mindrlhf.errors import UserError
from mindrlhf.files.atomic import atomic_folder
from mindrlhf.files.json import write_json
from mindrlhf.files.text import some
from mindrlhf.models.parameters import ParameterSpec, parameter_table
from mindrlhf.models.vision.rows import released
from mindrlhf.parallel.layout import inside, overlap, selected

PEFT_WEIGHTS_FILE = "adapter_model.safetensors"
_PREFIX = "base_model.model."  # of PEFT's names, in front of Hugging Face's names
_NAME = re.compile(r"(?P<module>.+)\.lora_(?P<matrix>[AB])\.weight")


@dataclass(frozen=True, eq=False)
class StoredAdapter:
    """Complete adapter, loaded from a folder.

    arrays: Hugging Face's module path with `.lora_A.weight` [r, in] or `.lora_B.weight` [out, r] -> float32.
    """

    folder: Path
    adapter: Adapter
    arrays: Mapping[str, np.ndarray]
    base: Base

    def check_fits(self, config: ModelConfig, model: str) -> None:
        """Check that the adapter's matrices fit a model, called `model` in messages."""
        table = parameter_table(config.model_copy(update={"adapter": self.adapter}))
        expected = {tensor.name: tensor.shape for spec in table if spec.adapts for tensor in spec.hf_tensors}
        advice = "give the base model that it was trained on"
        for name, array in self.arrays.items():
            if name not in expected:
                raise UserError(f"{self.folder}: has {name}, and {model} has no such module to adapt; {advice}.")
            if array.shape != expected[name]:
                shapes = f"shape {list(array.shape)}, and {model} asks for {list(expected[name])}"
                raise UserError(f"{self.folder}: {name} has {shapes}; {advice}.")
        if missing := [name for name in expected if name not in self.arrays]:
            found = f"{self.folder}: {some(missing)} are missing, which its target_modules name in {model}"
            raise UserError(f"{found}; {advice}, or get the adapter again.")

    def check_base(self, fingerprint: str, model: str) -> None:
        """Check that a model is the adapter's base, if the adapter records a fingerprint."""
        if self.base.fingerprint not in (None, fingerprint):
            found = f"{self.folder}: was trained on {self.base.name}, whose weights are not those of {model}"
            raise UserError(f"{found} ({self.base.fingerprint[:12]} and {fingerprint[:12]}); give that base model.")

    def check_agrees(self, settings: LoraSettings) -> None:
        """Check that no setting of a run contradicts this adapter, defaults excepted."""
        defaults = LoraSettings()
        for name in ("rank", "alpha", "use_rslora", "target_modules", "exclude_modules", "dropout"):
            ours = getattr(settings, name)
            theirs = getattr(self.adapter, name)
            if ours not in (theirs, getattr(defaults, name)):
                found = f"lora.{name} is {brief(ours)}, and the adapter of lora.adapter_path {settings.adapter_path}"
                raise UserError(f"{found} has {brief(theirs)}; leave lora.{name} out.")

    def merged(self, spec: ParameterSpec, weight: np.ndarray, index: tuple[slice, ...] | None = None) -> np.ndarray:
        """Add the adapter's product to a weight of the base, in place; returns it.

        weight: the part `index` of the parameter, float32; a parameter without an adapter is left unchanged.
        """
        part = selected(index or (slice(None),) * len(spec.shape), spec.shape)
        for tensor in spec.hf_tensors if spec.kind == "matrix" else ():
            found = self.adapter.of(tensor.module)
            common = overlap(tensor.box, part)
            if found is not None and common is not None:
                *_, rows, columns = inside(common, tensor.box)
                first, second = (self.arrays[f"{tensor.module}.lora_{matrix}.weight"] for matrix in "AB")
                weight[inside(common, part)] += product(found[1], first[:, columns], second[rows])
        return weight

    def over(
        self, read: Callable[[ParameterSpec], np.ndarray], index: Callable[[ParameterSpec], tuple[slice, ...] | None]
    ) -> Callable[[ParameterSpec], np.ndarray]:
        """Return a reader that merges the adapter into each part `index` that `read` returns."""
        return lambda spec: self.merged(spec, read(spec), index(spec))


def product(scale: float, first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Compute scale * B A for A [..., rank, in], B [..., out, rank]."""
    return np.float32(scale) * (second @ first)


def is_adapter(path: str | Path | None) -> bool:
    """Test for a folder with an adapter in PEFT's format."""
    return path is not None and Path(path, PEFT_CONFIG_FILE).is_file()


def read_adapter(folder: str | Path) -> StoredAdapter:
    """Read and check an adapter, given by its folder or its hub id.

    `UserError` for anything but whole, finite, plain LoRA.
    """
    folder = Path(local_model(str(folder)))
    if not folder.is_dir():
        raise UserError(f"{folder}: there is no such folder; give an adapter's, with its {PEFT_CONFIG_FILE}.")
    adapter, base = read_peft_config(folder / PEFT_CONFIG_FILE)
    file = folder / PEFT_WEIGHTS_FILE
    if not file.is_file():
        hint = " (a .bin file has to be converted to safetensors first)" if any(folder.glob("*.bin")) else ""
        raise UserError(f"{folder}: has no {PEFT_WEIGHTS_FILE}{hint}; get the adapter again.")
    tensors = index_safetensors(file)
    if base.sha256 not in (None, describe(file).sha256):
        right = f"get the adapter again, or remove {OWN_FILE} if another program wrote it"
        raise UserError(f"{file}: is damaged (its checksum has changed); {right}.")
    arrays = {}
    for name, tensor in tensors.items():
        _check_tensor(adapter, tensor, tensors)
        array = tensor.read()
        if fault := fault_of(array):
            raise UserError(f"{file}: {name} holds {fault}; get an adapter that was trained without.")
        arrays[released(name.removeprefix(_PREFIX))] = array
    if not arrays:
        raise UserError(f"{file}: holds no tensor; get the adapter again.")
    if any(name.removeprefix(_PREFIX) not in arrays for name in tensors):
        adapter = _of_modules(adapter, arrays)
    return StoredAdapter(folder, adapter, arrays, base)


def _of_modules(adapter: Adapter, arrays: Iterable[str]) -> Adapter:
    """Name the modules of arrays, in place of patterns of other paths."""
    modules = tuple(dict.fromkeys(name.rpartition(".lora_")[0] for name in arrays))
    return replace(adapter, target_modules=modules, exclude_modules=())


def _check_tensor(adapter: Adapter, tensor: StoredTensor, tensors: Mapping[str, StoredTensor]) -> None:
    """Check one tensor's name, type and shape, and that its partner is there."""
    file = tensor.file
    name = tensor.name
    parsed = _NAME.fullmatch(name.removeprefix(_PREFIX)) if name.startswith(_PREFIX) else None
    if parsed is None:
        raise UserError(
            f"{file}: holds {name}, which is no matrix of plain LoRA (like {_PREFIX}model.layers.0.self_attn.q_proj"
            ".lora_A.weight); save the adapter with PEFT's save_pretrained, without other trained modules."
        )
    tensor.check()
    found = adapter.of(parsed["module"])
    dim = "AB".index(parsed["matrix"])
    partner = f"{_PREFIX}{parsed['module']}.lora_{'BA'[dim]}.weight"
    fault = None
    if found is None:
        fault = f"holds {name}, and target_modules of {PEFT_CONFIG_FILE} do not name it"
    elif len(tensor.shape) != 2 or tensor.shape[dim] != found[0]:
        fault = f"{name} has shape {list(tensor.shape)}, and {PEFT_CONFIG_FILE} gives it rank {found[0]}"
    elif partner not in tensors:
        fault = f"holds {name} without {partner}"
    if fault:
        raise UserError(f"{file}: {fault}; get both files again.")


def write_adapter(
    folder: str | Path,
    adapter: Adapter,
    arrays: Mapping[str, np.ndarray],
    base: Base,
    card: Mapping[str, bytes] | None = None,
    replaces: bool = False,
    in_memory: Callable[[str], str] = str,
) -> None:
    """Write an adapter folder, which appears complete or not at all.

    arrays: module path and `.lora_A.weight` or `.lora_B.weight` -> float array. base: its sha256 is set here. card:
    files of the model card. replaces: replace an earlier folder of a model; any other non-empty folder is refused.
    in_memory: of the model's family.
    """
    if replaces:
        check_replaceable(Path(folder))
    names = {f"{_PREFIX}{in_memory(name)}": array for name, array in sorted(arrays.items())}
    with atomic_folder(folder, replaces) as temporary:
        digest = hashlib.sha256()
        layout = [(name, array.shape) for name, array in names.items()]
        write_safetensors(temporary / PEFT_WEIGHTS_FILE, layout, names.values(), "float32", {"format": "pt"}, digest)
        modules = list(dict.fromkeys(name.rpartition(".lora_")[0] for name in arrays))
        described = replace(base, sha256=digest.hexdigest())
        write_json(temporary / PEFT_CONFIG_FILE, peft_config(adapter, modules, described, in_memory))
        write_json(temporary / OWN_FILE, own_facts(described))
        for name, text in (card or {}).items():
            (temporary / name).write_bytes(text)
