"""Adapters in place of models: PEFT folders, and training checkpoints of adapters."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
from pydantic import TypeAdapter

from mindrlhf.checkpoint.hf import read_hf_config
from mindrlhf.checkpoint.hf_tensors import split
from mindrlhf.checkpoint.local import local_model
from mindrlhf.checkpoint.peft import StoredAdapter, is_adapter, product, read_adapter
from mindrlhf.checkpoint.peft_config import PEFT_CONFIG_FILE, Base, read_peft_config
from mindrlhf.checkpoint.resume import Checkpoint, is_checkpoint, newest
from mindrlhf.checkpoint.training_state import WEIGHTS
from mindrlhf.configs.lora import Adapter, LoraSettings, unmatched
from mindrlhf.configs.model import ModelConfig
from mindrlhf.configs.problems import brief
from mindrlhf.errors import UserError
from mindrlhf.models.parameters import ParameterSpec, parameter_table
from mindrlhf.models.vision.rows import is_tower


def base_path(folder: str | Path) -> str:
    """Find a PEFT folder's base model by the path or id in its configuration."""
    named = read_peft_config(Path(folder, PEFT_CONFIG_FILE))[1].name
    try:
        name = named and local_model(named)
    except UserError as error:
        raise UserError(f"{folder}: is an adapter of {error}") from None
    if name is None or not Path(name).exists() or is_adapter(name):
        state = "names no base model" if name is None else f"is an adapter of {name}, which is no model here"
        raise UserError(f"{folder}: {state}; give the base model, and this folder as its adapter.")
    return name


def checkpoint_adapter(checkpoint: Checkpoint) -> StoredAdapter | None:
    """Read the adapters of a training checkpoint; None if it holds whole weights."""
    with checkpoint.understood("run.model.adapter"):
        saved = checkpoint.run.get("model", {}).get("adapter")
        if saved is None:
            return None
        adapter = TypeAdapter(Adapter).validate_python(saved)
        recorded = Base(checkpoint.run["base"]["path"], checkpoint.run["base"]["fingerprint"])
    model = read_hf_config(checkpoint.hf_folder, seeing=True).model_copy(update={"adapter": adapter})
    rows = [spec for spec in parameter_table(model) if spec.adapts]
    weights = checkpoint.weights(WEIGHTS, {spec.name: spec.shape for spec in rows})
    arrays = {name: tensor for spec in rows for name, tensor in split(spec, weights.read(spec.name))}
    return StoredAdapter(checkpoint.folder, adapter, arrays, recorded)


def with_adapters(model: ModelConfig, settings: LoraSettings, path: str | None) -> ModelConfig:
    """Add the adapters that the settings ask for to the model of `path`."""
    if not settings.enabled:
        return model
    stored = None if settings.adapter_path is None else read_adapter(settings.adapter_path)
    if stored is not None:
        stored.check_agrees(settings)
    if is_adapter(path) or _holds_adapters(path):
        right = "give its base model, and it in PEFT's format as lora.adapter_path, or a merged model (mindrlhf export)"
        raise UserError(f"{path}: is an adapter, and the settings of lora ask for one over it; {right}.")
    if stored is not None:
        stored.check_fits(model, path or "the model")
    else:
        _check_modules(model, settings)
    adapter = settings.adapter() if stored is None else stored.adapter
    model = model.model_copy(update={"adapter": adapter})
    if not any(spec.adapts for spec in parameter_table(model)):
        named = f"lora.target_modules is {brief(adapter.target_modules)}, and without lora.exclude_modules that"
        raise UserError(f"{named} is no module of the model; use all-linear, or names like q_proj and down_proj.")
    if model.dropout and any(spec.adapts and is_tower(spec) for spec in parameter_table(model)):
        found = f"lora.dropout is {model.dropout:g}, and adapters of the vision tower have none"
        raise UserError(f"{found}; set it to 0, or lora.target_modules to modules of the text (all-linear is those).")
    return model


def _check_modules(model: ModelConfig, settings: LoraSettings) -> None:
    """Refuse a name of modules to adapt or exclude that matches none."""
    table = parameter_table(model)
    linear = {tensor.module for spec in table if spec.kind == "matrix" for tensor in spec.hf_tensors}
    every = {tensor.module for spec in table for tensor in spec.hf_tensors}
    for name, paths, kind in (
        ("target_modules", linear, "linear module of the model's layers"),
        ("exclude_modules", every | {"lm_head"}, "module of the model"),
    ):
        lost = unmatched(getattr(settings, name), paths)
        if lost is not None:
            given = f"lora.{name} is {brief(getattr(settings, name))}, and {lost!r} is no {kind}"
            known = ", ".join(dict.fromkeys(path.rpartition(".")[2] for path in sorted(linear)))
            raise UserError(f"{given}; give a list of names ({known}), or a regular expression of whole paths.")


def _holds_adapters(path: str | None) -> bool:
    """Test for a training checkpoint of adapters."""
    if path is None or not is_checkpoint(path):
        return False
    return newest(path, Checkpoint.verify_description).run.get("model", {}).get("adapter") is not None


def split_adapter(
    tensors: Iterable[tuple[ParameterSpec, np.ndarray]], arrays: dict[str, np.ndarray]
) -> Iterator[tuple[ParameterSpec, np.ndarray]]:
    """Merge adapters into the weights before them, and collect their matrices.

    Yields the weights, with rows of the table without adapters. tensors: in the order of the table, where A and B
    follow their weight, if it is present. arrays: filled with the matrices by Hugging Face's names.
    """
    held: list[tuple[ParameterSpec, np.ndarray]] = []
    for spec, array in tensors:
        if spec.adapts:
            arrays |= split(spec, array)
            if spec.kind == "lora_a":
                first = array
            else:
                held = [(base, weight + product(spec.scale, first, array)) for base, weight in held]
        else:
            yield from held
            held = [(replace(spec, trains=True), array)]
    yield from held
