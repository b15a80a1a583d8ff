"""Tokenizer of a GGUF file: byte-level BPE with its special tokens and chat templates."""

from collections.abc import Sequence
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, processors

from mindrlhf.checkpoint.gguf.file import GgufFile
from mindrlhf.checkpoint.gguf.model import ENDS, TOKENS
from mindrlhf.checkpoint.gguf.pre_tokenizers import NAMED, PreTokenizer
from mindrlhf.configs.problems import brief
from mindrlhf.data.tokenizer import Tokenizer
from mindrlhf.data.tokenizer_config import DEFAULT_TEMPLATE
from mindrlhf.errors import UserError
from mindrlhf.files.text import some

TEMPLATE = "tokenizer.chat_template"
BPE_MODEL = "gpt2"  # the format's name of byte-level BPE
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED = 1, 2, 3, 4, 5  # types of tokens
# Key of `tokenizer_config.json` -> key of the id in the file.
TOKEN_IDS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}


def read_tokenizer(file: GgufFile) -> Tokenizer:
    """Build the tokenizer that a file describes; raises UserError for another kind."""
    pre = _pre_tokenizer(file)
    tokens = _texts(file, "tokens")
    types = file.metadata.get(f"{TOKENS}token_type", [NORMAL] * len(tokens))
    if not isinstance(types, list) or len(types) != len(tokens):
        raise UserError(f"{file.path}: {TOKENS}token_type has not one entry for each of {len(tokens)} tokens.")
    types = list(types)
    ids = {key: _token_id(file, key, len(tokens)) for key in (*TOKEN_IDS.values(), *ENDS)}
    for token_id in [ids[key] for key in ENDS if ids[key] is not None]:
        types[token_id] = CONTROL  # whatever the file calls it
    core = _core(file, pre, tokens, types)
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    config |= {key: tokens[ids[name]] for key, name in TOKEN_IDS.items() if ids[name] is not None}
    begin = config.get("bos_token")
    adds = bool(begin and file.metadata.get(f"{TOKENS}add_bos_token", pre.begins))
    config["add_bos_token"] = adds
    if adds:
        core.post_processor = processors.TemplateProcessing(
            single=[begin, "$A"], pair=[begin, "$A", begin, "$B:1"], special_tokens=[(begin, ids["bos_token_id"])]
        )
    if templates := _templates(file):
        config["chat_template"] = templates
    return Tokenizer(core, config, str(file.path))


def _pre_tokenizer(file: GgufFile) -> PreTokenizer:
    kind = file.metadata.get(f"{TOKENS}model")
    if kind != BPE_MODEL:
        found = f"{file.path}: its tokenizer is {brief(kind)}, and byte-level BPE ({BPE_MODEL}) is read"
        raise UserError(f"{found}; give the model in Hugging Face's format.")
    name = file.metadata.get(f"{TOKENS}pre", "default")
    if not isinstance(name, str) or name not in NAMED:
        found = f"{file.path}: {TOKENS}pre is {brief(name)}, and {', '.join(NAMED)} are read"
        raise UserError(f"{found}; give the model in Hugging Face's format.")
    return NAMED[name]


def _texts(file: GgufFile, key: str) -> list[str]:
    found = file.metadata.get(f"{TOKENS}{key}")
    if not isinstance(found, list) or not found or not all(isinstance(one, str) for one in found):
        raise UserError(f"{file.path}: {TOKENS}{key} is no list of texts; get the file again.")
    return found


def _token_id(file: GgufFile, key: str, count: int) -> int | None:
    found = file.metadata.get(f"{TOKENS}{key}")
    if found is not None and not (type(found) is int and 0 <= found < count):
        raise UserError(f"{file.path}: {TOKENS}{key} is {brief(found)}, and the tokens are 0 to {count - 1}.")
    return found


def _core(file: GgufFile, pre: PreTokenizer, tokens: Sequence[str], types: Sequence[int]) -> tokenizers.Tokenizer:
    """Build the pipeline; each token gets its place in the file as its id."""
    added = [place for place, kind in enumerate(types) if kind in (UNKNOWN, CONTROL, USER_DEFINED)]
    body = _body(types, added)
    vocabulary = {token: place for place, token in enumerate(tokens[:body])}
    merges = [_merged(file, merge) for merge in _texts(file, "merges")]
    lost = [f"{a} {b}" for a, b in merges if not {a, b, a + b} <= vocabulary.keys()]
    if lost:
        found = f"{file.path}: {TOKENS}merges has {some(lost)}, and {TOKENS}tokens lacks its parts or its result"
        raise UserError(f"{found}; get the file again.")
    core = tokenizers.Tokenizer(models.BPE(vocabulary, merges, ignore_merges=pre.whole))
    core.pre_tokenizer = pre.build()
    core.decoder = decoders.ByteLevel()
    if pre.normalizer:
        core.normalizer = pre.normalizer
    core.add_tokens(
        [AddedToken(tokens[place], normalized=False, special=types[place] != USER_DEFINED) for place in added]
    )
    used = [place for place, kind in enumerate(types) if kind != UNUSED]
    wrong = [tokens[place] for place in used if core.token_to_id(tokens[place]) != place]
    if wrong:
        raise UserError(f"{file.path}: {TOKENS}tokens has {some([repr(one) for one in wrong])} twice; get it again.")
    return core


def _body(types: Sequence[int], added: Sequence[int]) -> int:
    """Count the tokens of the BPE model.

    Added tokens at the end, and unused ones behind them, are no part of it.
    """
    body = max((place for place, kind in enumerate(types) if kind != UNUSED), default=-1) + 1
    for place in reversed(added):
        if place != body - 1:
            break
        body = place
    return body


def _merged(file: GgufFile, merge: str) -> tuple[str, str]:
    """Split a merge into its parts; the first may begin with a space."""
    first, space, second = merge[1:].partition(" ")
    if not space:
        raise UserError(f"{file.path}: {TOKENS}merges has {brief(merge)}, which is no pair; get the file again.")
    return merge[:1] + first, second


def _templates(file: GgufFile) -> str | list[dict[str, str]] | None:
    """Read the chat templates: one, or several by name."""
    found = {key: text for key, text in file.metadata.items() if key == TEMPLATE or key.startswith(f"{TEMPLATE}.")}
    named = {key.removeprefix(f"{TEMPLATE}."): text for key, text in found.items()}
    if TEMPLATE in named:
        named = {DEFAULT_TEMPLATE: named.pop(TEMPLATE)} | named
    if not all(isinstance(text, str) for text in named.values()):
        raise UserError(f"{file.path}: {TEMPLATE} is no text; get the file again.")
    if set(named) == {DEFAULT_TEMPLATE}:
        return named[DEFAULT_TEMPLATE]
    return [{"name": name, "template": text} for name, text in named.items()] or None
