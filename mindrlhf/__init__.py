"""GRPO training for language models on MindSpore, as commands and from Python.

    from mindrlhf import GRPOConfig, GRPOTrainer

    trainer = GRPOTrainer("path/to/model", reward_funcs="gsm8k", args=GRPOConfig("out"), train_dataset=rows)
    trainer.train()

Importing the package imports nothing else: each name below is imported at its first use.
"""

import importlib
from typing import TYPE_CHECKING, Any

from mindrlhf.version import __version__ as __version__

if TYPE_CHECKING:
    from mindrlhf.api.callbacks import TrainerCallback as TrainerCallback
    from mindrlhf.api.callbacks import TrainerControl as TrainerControl
    from mindrlhf.api.callbacks import TrainerState as TrainerState
    from mindrlhf.api.config import GRPOConfig as GRPOConfig
    from mindrlhf.api.config import SFTConfig as SFTConfig
    from mindrlhf.api.grpo_trainer import GRPOTrainer as GRPOTrainer
    from mindrlhf.api.sft_trainer import SFTTrainer as SFTTrainer
    from mindrlhf.errors import UserError as UserError

_PLACES = {
    "GRPOConfig": "mindrlhf.api.config",
    "GRPOTrainer": "mindrlhf.api.grpo_trainer",
    "SFTConfig": "mindrlhf.api.config",
    "SFTTrainer": "mindrlhf.api.sft_trainer",
    "TrainerCallback": "mindrlhf.api.callbacks",
    "TrainerControl": "mindrlhf.api.callbacks",
    "TrainerState": "mindrlhf.api.callbacks",
    "UserError": "mindrlhf.errors",
}


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_PLACES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_PLACES})
