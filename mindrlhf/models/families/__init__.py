"""Supported model families: one file each, listed here. Imports no MindSpore."""

from collections.abc import Mapping
from importlib import import_module
from types import MappingProxyType

from mindrlhf.models.families.family import LLAMA_CLASS, LLAMA_TYPE, Chat, Family, Vocabulary

__all__ = [
    "CHATS",
    "DEFAULT",
    "FAMILIES",
    "LLAMA_CLASS",
    "LLAMA_TYPE",
    "SEEING",
    "VOCABULARY",
    "Chat",
    "Family",
    "Vocabulary",
]

# The first family is the default if nothing names one.
_NAMES = (
    "qwen2",
    "qwen3",
    "llama",
    "qwen3_moe",
    "qwen2_5_vl",
)

FAMILIES: Mapping[str, Family] = MappingProxyType({name: import_module(f"{__name__}.{name}").FAMILY for name in _NAMES})
DEFAULT = FAMILIES[_NAMES[0]]
# Images of practice tasks are for this one.
SEEING = next(family for family in FAMILIES.values() if family.sees)
# Prompt templates of chats, by name.
CHATS: Mapping[str, Chat] = MappingProxyType({one.chat.name: one.chat for one in FAMILIES.values() if not one.sees})
# Text pipeline for bare `vocab.json` and `merges.txt` files.
VOCABULARY: Vocabulary = next(family.vocabulary for family in FAMILIES.values() if family.vocabulary)
