"""Flags of `mindrlhf train` and `sft` as typed values. Imports nothing that starts threads."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Protocol, TypeVar

from mindrlhf.files.naming import DEFAULT_FOLDER

if TYPE_CHECKING:
    from mindrlhf.configs.yaml_file import Layer

Flags = TypeVar("Flags", bound="RunFlags")


class TokenizerFlags(Protocol):
    """Flags that name a tokenizer."""

    vocab_path: str | None
    merges_file_path: str | None
    tokenizer_path: str | None


class LayoutFlags(Protocol):
    """Flags that name the training graph's model YAML and override its values."""

    sft_path_train: str | None
    device_target: str | None
    data_parallel: int | None
    tensor_parallel: int | None
    pipeline_parallel: int | None
    sequence_parallel: bool | None


@dataclass(frozen=True)
class RunFlags:
    """Flags of every kind of run; see `mindrlhf train --help`.

    overrides: `group.key=value` each. settings: values from a calling program, which these flags override.
    save_data_file: set only for runs that generate.
    """

    sft_path_train: str | None = None
    device_target: str | None = None
    data_parallel: int | None = None
    tensor_parallel: int | None = None
    pipeline_parallel: int | None = None
    sequence_parallel: bool | None = None
    overrides: Sequence[str] = ()
    vocab_path: str | None = None
    merges_file_path: str | None = None
    tokenizer_path: str | None = None
    mind_dataset_dir: str | None = None
    output_dir: Path | None = None
    save_ckpt_dir: Path = DEFAULT_FOLDER
    save_data_file: ClassVar[Path | None] = None
    load_sft_checkpoint_train: str | None = None
    resume_training: str | None = None
    enable_compile_cache: bool = False
    settings: "Layer | None" = None

    @classmethod
    def of(cls: type[Flags], args: argparse.Namespace) -> Flags:
        """Take the flags from a parsed command line, which may have more."""
        names = [field.name for field in fields(cls)]
        return cls(**{name: value for name, value in vars(args).items() if name in names})


@dataclass(frozen=True)
class TrainFlags(RunFlags):
    """Flags of a GRPO run, which `mindrlhf train --help` explains."""

    sft_path_infer: str | None = None
    infer_tensor_parallel: int | None = None
    trainer_ranks: int | None = None
    generator_ranks: int | None = None
    scorer_ranks: int | None = None
    grpo_config: str | None = None
    from_verl: str | None = None
    save_data_file: Path | None = None  # type: ignore[misc]  # runs of other kinds have none to set
    load_sft_checkpoint_infer: str | None = None
    load_ref_checkpoint: str | None = None
    load_critic_checkpoint: str | None = None
    use_parallel: bool | None = None
    only_save_strategy: bool = False
    replay: Path | None = None


@dataclass(frozen=True)
class SFTFlags(RunFlags):
    """Flags of fine-tuning, which `mindrlhf sft --help` explains."""

    sft_config: str | None = None
    save_ckpt_dir: Path = Path("out/sft/ckpt")
