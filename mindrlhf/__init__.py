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
# TRL's names that are not here -> what is.
_OTHERS = {
    "RLOOTrainer": "GRPOTrainer with GRPOConfig(grpo_config='preset:rloo') is its algorithm",
    "RLOOConfig": "GRPOConfig(grpo_config='preset:rloo') has its values",
    "PPOTrainer": "GRPOTrainer with GRPOConfig(grpo_config='preset:ppo') is its algorithm",
    "PPOConfig": "GRPOConfig(grpo_config='preset:ppo') has its values",
    "GKDTrainer": "GRPOTrainer with algorithm={'advantage': 'distillation', 'teacher': ...} distils on policy",
    "DPOTrainer": "preference pairs are not trained on here; GRPOTrainer and SFTTrainer are the trainers",
    "KTOTrainer": "preferences are not trained on here; GRPOTrainer and SFTTrainer are the trainers",
    "ORPOTrainer": "preference pairs are not trained on here; GRPOTrainer and SFTTrainer are the trainers",
    "RewardTrainer": "reward models are not trained here; a reward function may load one that is",
    "TrlParser": "a configuration takes keywords, GRPOConfig(**values); argparse reads a script's own",
    "ModelConfig": "the model is GRPOTrainer's first argument, and peft_config its adapters",
    "ScriptArguments": "it is a class of TRL's scripts, `from trl import ScriptArguments`",
    "get_peft_config": "give a LoraConfig of PEFT, or a dict of its values, as peft_config",
    "get_quantization_config": "rollout={'weights': 'int8'} packs weights to generate; training does not quantise",
    "get_kbit_device_map": "devices are chosen by device_target and layouts by tensor_parallel",
}
_OTHERS |= {name.replace("Trainer", "Config"): text for name, text in _OTHERS.items() if name.endswith("Trainer")}


def __getattr__(name: str) -> Any:
    if name in _OTHERS:
        raise ImportError(f"mindrlhf has no {name}: {_OTHERS[name]}.", name=__name__)
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_PLACES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_PLACES})
