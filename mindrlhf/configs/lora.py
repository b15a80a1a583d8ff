"""Low-rank adapters: settings of a run, and one adapter's modules with ranks and scales.

An adapter adds scale * B A to the weight [out, in] of a linear module, with A [r, in] and B [out, r] (Hu et al. 2021,
arXiv:2106.09685, section 4.1). Modules are matched by PEFT's rules. Not here: DoRA, adapters of the embedding and of
the head.
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cache
from math import sqrt
from typing import Any, Literal

import regex
from pydantic import Field, field_validator

from mindrlhf.configs.base import Float32, Settings
from mindrlhf.configs.model_names import MCORE_MODULES, MODULES
from mindrlhf.errors import UserError
from mindrlhf.files.printable import shortened

ALL_LINEAR = "all-linear"
LAYERS = "model.layers."  # the beginning of every layer's names, in Hugging Face's checkpoints and ours
MCORE_LAYERS = "decoder.layers."  # the same in MindFormers' newer models

MATCH_S = 0.2  # of processor time for a pattern and a path; a pattern may take for ever otherwise

Modules = str | tuple[str, ...]
Init = Literal["kaiming", "gaussian"]


@dataclass(frozen=True)
class Adapter:
    """Modules of one adapter, with their ranks and scales.

    rank, alpha: values for modules without their own pattern. use_rslora: scales are alpha / sqrt(rank), not alpha /
    rank (Kalajdzievski 2023, arXiv:2312.03732). target_modules, exclude_modules: names, each the end of a module's
    path, or one regular expression of whole paths; `all-linear` is every linear module of every layer. rank_pattern,
    alpha_pattern: the end of a path, as a regular expression -> rank or alpha. init: initial values of A; B starts at
    0. dropout: share of the inputs of A that updates drop; the weight gets all inputs.
    """

    rank: int
    alpha: float
    use_rslora: bool = False
    target_modules: Modules = ALL_LINEAR
    exclude_modules: Modules = ()
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)
    init: Init = "kaiming"
    dropout: float = 0.0

    def of(self, hf_module: str) -> tuple[int, float] | None:
        """Find rank and scale of a linear module by its Hugging Face path.

        Returns None for a module without an adapter.
        """
        if _matches(self.exclude_modules, hf_module) or not _matches(self.target_modules, hf_module):
            return None
        rank = _by_pattern(self.rank_pattern, hf_module, self.rank)
        alpha = _by_pattern(self.alpha_pattern, hf_module, self.alpha)
        return rank, alpha / (sqrt(rank) if self.use_rslora else rank)


class LoraSettings(Settings):
    """Low-rank adapters that train in place of the weights."""

    rank: int = Field(0, ge=0)
    """Rank of the adapters; 0 trains all weights (verl model.lora_rank, TRL lora_r)."""
    alpha: Float32 = Field(32.0, gt=0.0)
    """The product B A is scaled by alpha / rank (verl model.lora_alpha, TRL lora_alpha)."""
    dropout: Float32 = Field(0.0, ge=0.0, lt=1.0)
    """Share of the adapters' inputs that updates drop; these layers then run composed, not fused (verl
    model.lora.dropout, TRL lora_dropout)."""
    target_modules: Modules = ALL_LINEAR
    """Names of the modules with adapters, or one regular expression of their whole paths; all-linear is every linear
    module of the layers (verl model.target_modules, TRL lora_target_modules)."""
    exclude_modules: Modules = ()
    """Names, or one regular expression, of modules without adapters (verl model.exclude_modules)."""
    use_rslora: bool = False
    """Scale by alpha / sqrt(rank) instead (TRL use_rslora)."""
    init: Init = "kaiming"
    """Initial values of A: uniform within 1 / sqrt(inputs), or normal with deviation 1 / rank; B is 0."""
    adapter_path: str | None = None
    """Folder of an adapter in PEFT's format to start from (verl model.lora_adapter_path)."""
    save: Literal["adapter", "merged", "both"] = "both"
    """Output of a run: the adapter in hf_adapter, the merged model in hf, or both."""
    reference: Literal["base", "start"] = "base"
    """Reference of the KL term: the model without adapters, or with the adapters it started from."""

    @field_validator("target_modules", "exclude_modules")
    @classmethod
    def _readable(cls, modules: Modules) -> Modules:
        if isinstance(modules, str):
            try:
                regex.compile(modules)
            except (regex.error, RecursionError, OverflowError) as error:
                raise ValueError(f"{modules!r} is no regular expression ({error}); give a list of names") from None
        return modules

    @property
    def enabled(self) -> bool:
        """True when adapters train and the weights do not."""
        return self.rank > 0 or self.adapter_path is not None

    def adapter(self) -> Adapter:
        """Describe a new adapter with these settings."""
        shared = ("rank", "alpha", "use_rslora", "target_modules", "exclude_modules", "init", "dropout")
        return Adapter(**{name: getattr(self, name) for name in shared})


class PetSettings(Settings):
    """Low-rank adapters in MindFormers' names (`pet_config`, `lora_config`)."""

    pet_type: Literal["lora"] = "lora"
    """Kind of adapters."""
    lora_rank: int = Field(8, ge=1)
    """lora.rank."""
    lora_alpha: Float32 = Field(16.0, gt=0.0)
    """lora.alpha."""
    lora_dropout: Float32 = Field(0.0, ge=0.0, lt=1.0)
    """lora.dropout (MindFormers' default is 0.01)."""
    target_modules: str
    """Regular expression for the beginning of MindFormers' module paths, for lora.target_modules."""
    exclude_layers: None = None
    """Must be absent; lora.exclude_modules excludes modules."""

    @field_validator("target_modules")
    @classmethod
    def _matching(cls, pattern: str) -> str:
        for branch in _entries(pattern):
            if not (branch and _translated(branch)):
                raise ValueError(f"{branch!r} matches none of {', '.join(MODULES)}; write .*wq|.*wv for example")
        return pattern

    def settings(self) -> dict[str, Any]:
        """Convert to settings of `LoraSettings`."""
        numbers = {"rank": self.lora_rank, "alpha": self.lora_alpha, "dropout": self.lora_dropout}
        return {**numbers, "target_modules": _translated(self.target_modules)}


def _translated(pattern: str) -> list[str]:
    """List Hugging Face's names of the modules that a pattern of MindFormers' matches."""
    paths = [(f"{LAYERS}0.{path}", [name]) for path, name in MODULES.items()]
    paths += [(f"{MCORE_LAYERS}0.{path}", names) for path, names in MCORE_MODULES.items()]
    try:
        found = {name for path, names in paths if matches(f"({pattern}).*", path) for name in names}
    except regex.error:
        return []
    return [name for name in MODULES.values() if name in found]


@cache
def matches(pattern: str, path: str) -> bool:
    """Test that a regular expression fits a whole path.

    UserError for one that takes too long.
    """
    try:
        return regex.fullmatch(pattern, path, timeout=MATCH_S) is not None
    except TimeoutError:
        found = f"the pattern {shortened(pattern, 60, '')!r} takes longer than {MATCH_S:g} s on {path}"
        raise UserError(f"{found}; write one without repeats inside of repeats, or a list of names.") from None


def _matches(modules: Modules, path: str) -> bool:
    if modules == ALL_LINEAR:
        return path.startswith(LAYERS)
    if isinstance(modules, str):
        return matches(modules, path)
    return any(path == name or path.endswith(f".{name}") for name in modules)


def unmatched(modules: Modules, paths: Collection[str]) -> str | None:
    """Find a name, or a regular expression's branch, that matches no path."""
    entries = _entries(modules) if isinstance(modules, str) else [(name,) for name in modules]
    lost = (entry for entry in entries if not any(_matches(entry, path) for path in paths))
    return next((entry if isinstance(entry, str) else entry[0] for entry in lost), None)


def _entries(pattern: str) -> list[str]:
    """Split a regular expression at its outermost `|`; one with brackets stays whole."""
    return [pattern] if re.search(r"[()\[\]]|\\\|", pattern) else pattern.split("|")


def _by_pattern(patterns: Mapping[str, float], path: str, default: float) -> float:
    """Find the value of the first pattern that matches the end of a path."""
    return next((value for key, value in patterns.items() if matches(rf"(.*\.)?({key})", path)), default)
