"""Tokenizers as metadata of GGUF files."""

from typing import Any

from mindrlhf.checkpoint.gguf.model import ENDS, TOKENS
from mindrlhf.checkpoint.gguf.pre_tokenizers import KNOWN, recognised
from mindrlhf.checkpoint.gguf.tokenizer import (
    BPE_MODEL,
    CONTROL,
    NORMAL,
    TEMPLATE,
    TOKEN_IDS,
    UNUSED,
    USER_DEFINED,
)
from mindrlhf.configs.model import ModelConfig
from mindrlhf.data.tokenizer import Tokenizer
from mindrlhf.data.tokenizer_config import DEFAULT_TEMPLATE, ConfiguredTokenizer, token_text
from mindrlhf.errors import UserError

NORMALIZERS = ("NFC", "Sequence")  # that llama.cpp leaves out: composed text has the same ids


def describe_tokenizer(tokenizer: ConfiguredTokenizer, config: ModelConfig, where: str) -> dict[str, Any]:
    """Describe a tokenizer by the keys of GGUF files.

    The vocabulary is filled up to the model's embedding with unused tokens. Raises UserError for a tokenizer that
    llama.cpp does not have.
    """
    content = _byte_level(tokenizer, where)
    pre = recognised(content)
    if pre is None:
        known = ", ".join(one.names[0] for one in KNOWN)
        raise UserError(
            f"{where}: its tokenizer cuts text as none of llama.cpp's ({known}); use Hugging Face's format."
        )
    added = {token["id"]: token for token in content["added_tokens"]}
    texts = {place: token for token, place in content["model"]["vocab"].items()}
    texts |= {place: token["content"] for place, token in added.items()}
    if max(texts) >= config.vocab_size:
        found = f"{where}: its tokenizer has {max(texts) + 1} tokens, and its embedding {config.vocab_size} rows"
        raise UserError(f"{found}; give model and tokenizer that belong together.")
    kinds = {place: CONTROL if token["special"] else USER_DEFINED for place, token in added.items()}
    places = range(config.vocab_size)
    merges = content["model"]["merges"]
    return {
        f"{TOKENS}model": BPE_MODEL,
        f"{TOKENS}pre": pre.names[0],
        f"{TOKENS}tokens": [texts.get(place, f"[PAD{place}]") for place in places],
        f"{TOKENS}token_type": [kinds.get(place, NORMAL) if place in texts else UNUSED for place in places],
        f"{TOKENS}merges": [merge if isinstance(merge, str) else " ".join(merge) for merge in merges],
        **{f"{TOKENS}{key}": place for key, place in _token_ids(tokenizer, config).items()},
        f"{TOKENS}add_bos_token": bool(tokenizer.begin_ids),
        **_templates(tokenizer),
    }


def _byte_level(tokenizer: ConfiguredTokenizer, where: str) -> dict[str, Any]:
    """Return the content of a byte-level BPE tokenizer; UserError for another kind."""
    content = tokenizer.content if isinstance(tokenizer, Tokenizer) else None
    normalizer = (content or {}).get("normalizer") or {"type": "NFC"}
    plain = normalizer["type"] in NORMALIZERS and all(one["type"] == "NFC" for one in normalizer.get("normalizers", ()))
    if content is None or content["model"]["type"] != "BPE" or not plain:
        raise UserError(f"{where}: its tokenizer is no byte-level BPE, which GGUF files are written with here.")
    return content


def _token_ids(tokenizer: ConfiguredTokenizer, config: ModelConfig) -> dict[str, int]:
    """Collect the ids of special tokens; up to three tokens end a response."""
    ids = {key: tokenizer.token_to_id(token_text(tokenizer.config.get(name)) or "") for name, key in TOKEN_IDS.items()}
    ids["bos_token_id"] = config.bos_token_id if ids["bos_token_id"] is None else ids["bos_token_id"]
    ids["padding_token_id"] = tokenizer.pad_token_id
    ends = dict.fromkeys((tokenizer.eos_token_id, *config.eos_token_ids))
    ids |= dict(zip(ENDS, ends, strict=False))
    return {key: place for key, place in ids.items() if place is not None and 0 <= place < config.vocab_size}


def _templates(tokenizer: ConfiguredTokenizer) -> dict[str, str]:
    named = tokenizer.chat_templates
    return {TEMPLATE if name == DEFAULT_TEMPLATE else f"{TEMPLATE}.{name}": text for name, text in named.items()}
