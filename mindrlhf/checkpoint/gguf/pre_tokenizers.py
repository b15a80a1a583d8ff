"""Pre-tokenizers of GGUF files: how text is cut before byte-level BPE.

A file names its pre-tokenizer (`tokenizer.ggml.pre`). These are llama.cpp's, in the notation of Hugging Face's
tokenizers, whose regular expressions it adapts.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import Regex, normalizers, pre_tokenizers

from mindrlhf.models.families import VOCABULARY

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
DIGIT = r"\p{N}"
# Llama 3's expression is Qwen2's with up to three digits in a token.
LLAMA3 = VOCABULARY.split.replace(rf"|{DIGIT}|", rf"|{DIGIT}{{1,3}}|")


@dataclass(frozen=True)
class PreTokenizer:
    """Cut of text before BPE.

    names: llama.cpp's; the first is written. splits: regular expressions, one after the other; each match is a piece,
    and so is the text between two. whole: a piece that is a token is not merged (`ignore_merges`). begins: texts begin
    with the begin token unless the file says otherwise. composes: NFC comes first in Hugging Face's tokenizers, and is
    left out by llama.cpp.
    """

    names: tuple[str, ...]
    splits: tuple[str, ...]
    whole: bool = False
    begins: bool = False
    composes: bool = False

    def build(self) -> pre_tokenizers.PreTokenizer:
        """Build it for the library `tokenizers`."""
        steps = [pre_tokenizers.Split(Regex(split), behavior="isolated") for split in self.splits]
        letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        return pre_tokenizers.Sequence([*steps, letters])

    @property
    def normalizer(self) -> normalizers.Normalizer | None:
        """Its normaliser in Hugging Face's tokenizers."""
        return normalizers.NFC() if self.composes else None


KNOWN = (
    PreTokenizer(VOCABULARY.gguf, (VOCABULARY.split,), composes=True),
    PreTokenizer(("deepseek-r1-qwen", "megrez", "hunyuan"), (VOCABULARY.split,)),
    PreTokenizer(("llama-bpe", "llama3", "llama-v3", "falcon3"), (LLAMA3,), whole=True, begins=True),
    PreTokenizer(("smaug-bpe", "dbrx"), (LLAMA3,)),
    PreTokenizer(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), (DIGIT, GPT2)),
    PreTokenizer(("gpt-2", "mpt", "olmo", "phi-2", "exaone4", "gigachat", "a.x-4.0", "mellum"), (GPT2,)),
    PreTokenizer(("default",), (r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
)
NAMED = {name: one for one in KNOWN for name in one.names}


def recognised(content: dict[str, Any]) -> PreTokenizer | None:
    """Find the pre-tokenizer of a `tokenizer.json`, or None if llama.cpp has none.

    content: of the file.
    """
    splits = _splits(content.get("pre_tokenizer"))
    whole = bool(content["model"].get("ignore_merges"))
    composes = content.get("normalizer") is not None
    alike = [one for one in KNOWN if splits == one.splits and one.whole == whole]
    return next((one for one in alike if one.composes == composes), next(iter(alike), None))


def _splits(pre_tokenizer: dict[str, Any] | None) -> Sequence[str] | None:
    """List the regular expressions of a byte-level pre-tokenizer; None for any other step."""
    steps = (pre_tokenizer or {}).get("pretokenizers", [pre_tokenizer or {}])
    found: list[str] = []
    for step in steps:
        kind = step.get("type")
        if kind == "ByteLevel" and not step["add_prefix_space"]:
            found += [GPT2] if step["use_regex"] else []
        elif kind == "Digits" and step["individual_digits"]:
            found.append(DIGIT)
        elif kind == "Split" and step["behavior"] == "Isolated" and not step["invert"]:
            found.append(step["pattern"].get("Regex", json.dumps(step["pattern"])))
        else:
            return None
    letters = bool(steps) and steps[-1].get("type") == "ByteLevel"
    return tuple(found) if letters else None
