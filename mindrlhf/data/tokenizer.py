"""Text to token ids and back; bare vocabulary files get Qwen2's text pipeline."""

import json
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers

from mindrlhf.data.tokenizer_config import (
    ADDED_TOKEN_KEYS,
    CONFIG_NAME,
    ConfiguredTokenizer,
    added_tokens,
    read_config,
)
from mindrlhf.errors import UserError
from mindrlhf.files.atomic import atomic_files
from mindrlhf.files.json import write_json
from mindrlhf.files.text import is_there
from mindrlhf.models.families import SEEING, VOCABULARY

# What a tokenizer is tried on when it is opened, each length in turn, and the seconds that a length may take: patterns
# whose time grows with the square of a text's length need them, others some milliseconds.
_RUNS = {"letters": "a", "spaces": " ", "digits": "1", "signs": "!", "words": "a1 !"}
_LENGTHS = (1_000, 4_000, 16_000)
_MOST_SECONDS = 1.0

FILES = (
    "tokenizer.json",
    "vocab.json",
    "tokenizer.model",
)  # one of them is a folder's tokenizer, the first that is there
CHAT_TOKENS = VOCABULARY.control[:3]  # end of text, begin and end of a turn


class Tokenizer(ConfiguredTokenizer):
    """Encoder and decoder of text; the prompt template adds begin and end tokens."""

    def __init__(self, core: tokenizers.Tokenizer, config: dict[str, Any], where: str):
        self._core = core
        self.config = config
        self._where = where

    @classmethod
    def from_files(cls, vocab_path: str | Path, merges_path: str | Path) -> "Tokenizer":
        """Open `vocab.json` and `merges.txt` with Qwen2's normaliser and pre-tokenizer.

        Special tokens come from a `tokenizer_config.json` next to them; without one, Qwen2.5's own follow the last id
        of the vocabulary. UserError for missing, unreadable or contradicting files.
        """
        vocab_path = _existing(vocab_path)
        merges_path = _existing(merges_path)
        with _understood(f"{vocab_path} and {merges_path} are not a BPE vocabulary and its merges"):
            core = bare_core(models.BPE.from_file(str(vocab_path), str(merges_path)))
        ids = core.get_vocab().values()
        if max(ids, default=-1) != len(ids) - 1:
            fault = f"{vocab_path}: the ids are not 0 to {len(ids) - 1} without gaps"
            raise UserError(f"{fault}; give tokenizer.json instead.")
        config = read_config(vocab_path.parent) or {}
        if "added_tokens_decoder" not in config and not (vocab_path.parent / CONFIG_NAME).is_file():
            config = VOCABULARY.config | config
            add_tokens(core, VOCABULARY.control)
            add_tokens(core, VOCABULARY.markup, special=False)
        else:
            added = added_tokens(config, str(vocab_path))
            core.add_tokens([token for _, token in added])
            for token_id, token in added:
                if (found := core.token_to_id(token.content)) != token_id:
                    problem = f"{vocab_path}: {CONFIG_NAME} gives {token.content} the id {token_id}"
                    raise UserError(f"{problem}, but with this vocabulary it is {found}; use the files of one model.")
        _check_merges(core, vocab_path, merges_path)
        return cls(core, config, str(vocab_path))

    @classmethod
    def from_path(cls, path: str | Path) -> "Tokenizer":
        """Open an HF directory, a tokenizer.json, a vocab.json or a tokenizer.model."""
        path = _existing(path)
        if path.is_dir():
            found = next((path / name for name in FILES if is_there(path / name)), None)
            if found is None:
                raise UserError(f"{path}: holds no tokenizer; it should have {', '.join(FILES[:2])} or {FILES[2]}.")
            path = found
        if path.name in ("vocab.json", "merges.txt"):
            return cls.from_files(path.parent / "vocab.json", path.parent / "merges.txt")
        if path.suffix == ".model":
            from mindrlhf.data.sentencepiece_tokenizer import SentencePieceTokenizer

            return SentencePieceTokenizer.from_file(path)
        with _understood(f"{path}: not a tokenizer.json"):
            core = tokenizers.Tokenizer.from_file(str(path))
        core.no_padding()
        core.no_truncation()
        _check_pace(core, path)
        return cls(core, read_config(path.parent) or {}, str(path))

    def encode(self, text: str) -> list[int]:
        with self._working():
            return self._core.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode each text, on all cores."""
        with self._working():
            return [encoding.ids for encoding in self._core.encode_batch_fast(list(texts), add_special_tokens=False)]

    def decode(self, ids: Sequence[int] | np.ndarray, skip_special_tokens: bool = False) -> str:
        """Decode ids; ids outside the vocabulary give nothing, broken UTF-8 gives U+FFFD."""
        with self._working():
            return self._core.decode(np.asarray(ids).tolist(), skip_special_tokens=skip_special_tokens)

    def _working(self) -> AbstractContextManager[None]:
        return _understood(f"{self._where}: the tokenizer fails on a text, so it is damaged or hostile")

    def token_to_id(self, token: str) -> int | None:
        return self._core.token_to_id(token)

    def id_to_token(self, token_id: int) -> str | None:
        """Look up a token (byte-level letters); None outside the vocabulary."""
        return self._core.id_to_token(int(token_id))

    def _begin_ids(self) -> list[int]:
        with self._working():
            alone = self.encode("a")
            whole = self._core.encode("a").ids
        starts = (at for at in range(len(whole)) if alone and whole[at : at + len(alone)] == alone)
        return whole[: next(starts, 0)]

    def _added_tokens(self) -> Iterable[tuple[str, bool]]:
        return ((token.content, token.special) for token in self._core.get_added_tokens_decoder().values())

    @property
    def content(self) -> dict[str, Any]:
        """Content of its `tokenizer.json`."""
        return json.loads(self._core.to_str())

    @cached_property
    def size(self) -> int:
        """Largest id + 1: the least vocabulary size of a fitting model."""
        return max(self._core.get_vocab(with_added_tokens=True).values()) + 1

    def save(self, directory: str | Path) -> None:
        """Write tokenizer.json and tokenizer_config.json, which HF's classes load.

        Also vocab.json and merges.txt, if `from_files` would split text in the same way.
        """
        added = {
            str(token_id): {key: getattr(token, key) for key in ADDED_TOKEN_KEYS}
            for token_id, token in sorted(self._core.get_added_tokens_decoder().items())
        }
        # HF cleans up spaces in decoded text unless a flag forbids it, and then decode(encode(x)) is not x.
        known = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
        with atomic_files(directory) as stage:
            self._core.save(str(stage / "tokenizer.json"))
            if isinstance(self._core.model, models.BPE) and VOCABULARY.split in _splits(self._core):
                self._core.model.save(str(stage))
            write_json(stage / CONFIG_NAME, known | self.config | {"added_tokens_decoder": added})


@contextmanager
def _understood(fault: str) -> Iterator[None]:
    """Turn errors of tokenizers, also panics, into a `UserError`.

    The package raises bare Exception, and its panics are no Exception.
    """
    try:
        yield
    except (KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        raise UserError(f"{fault} ({error}).") from None


def bare_core(model: models.BPE) -> tokenizers.Tokenizer:
    """Build Qwen2's pipeline around a BPE model: NFC, its split, and byte letters."""
    core = tokenizers.Tokenizer(model)
    core.normalizer = normalizers.NFC()
    core.decoder = decoders.ByteLevel()
    split = pre_tokenizers.Split(Regex(VOCABULARY.split), behavior="isolated")
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.pre_tokenizer = pre_tokenizers.Sequence([split, letters])
    return core


def add_tokens(core: tokenizers.Tokenizer, tokens: Sequence[str], special: bool = True) -> None:
    core.add_tokens([AddedToken(token, normalized=False, special=special) for token in tokens])


def train_tokenizer(texts: Iterable[str], size: int, images: bool = False) -> Tokenizer:
    """Train a tokenizer of at most `size` ids on texts.

    The ids: 256 bytes, merges learnt from `texts`, then `<|endoftext|>` (pads), `<|im_start|>` and `<|im_end|>` (ends
    an answer). images: then also Qwen2.5-VL's tokens of images, and its chat template. UserError when `size` is too
    small for the bytes.
    """
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = VOCABULARY.control if images else CHAT_TOKENS
    least = len(alphabet) + len(special)
    if size < least:
        raise UserError(f"--tokenizer_vocab_size {size}: should be {least} or more, for the bytes and special tokens.")
    core = bare_core(models.BPE())
    letters = sorted(alphabet)
    trainer = trainers.BpeTrainer(vocab_size=size - len(special), initial_alphabet=letters, show_progress=False)
    core.train_from_iterator(texts, trainer)
    add_tokens(core, special)
    template = {"chat_template": SEEING.chat.chat_template} if images else {}
    return Tokenizer(core, VOCABULARY.config | {"eos_token": CHAT_TOKENS[2]} | template, "the trained tokenizer")


def _splits(core: tokenizers.Tokenizer) -> list[str]:
    state = json.loads(core.pre_tokenizer.__getstate__()) if core.pre_tokenizer else {}
    return [step["pattern"].get("Regex", "") for step in state.get("pretokenizers", [state]) if "pattern" in step]


def _check_merges(core: tokenizers.Tokenizer, vocab_path: Path, merges_path: Path) -> None:
    """Raise UserError for a token of several letters that no merge makes."""
    made = {"".join(line.split()) for line in merges_path.read_text(encoding="utf-8").split("\n")}
    added = {token.content for token in core.get_added_tokens_decoder().values()}
    longer = [token for token in core.get_vocab(with_added_tokens=False) if len(token) > 1 and token not in added]
    if missing := sum(token not in made for token in longer):
        raise UserError(
            f"{merges_path}: lacks the merges of {missing:,} of the {len(longer):,} tokens in {vocab_path} that have "
            "several letters; the file is cut or of another model, so get it again."
        )


def _check_pace(core: tokenizers.Tokenizer, path: Path) -> None:
    """Raise UserError if long words or white space take too much time.

    With some patterns the time grows with the square of a text's length: a downloaded file would hold a run up for
    hours over one long text. The longest texts are tried only where they could take too long: where the cube of the
    length would not keep them below the limit.
    """
    for kind, letters in _RUNS.items():
        for length in _LENGTHS:
            begun = time.thread_time()
            with _understood(f"{path}: the tokenizer fails on {length:,} {kind}, so it is damaged or hostile"):
                core.encode(letters * (length // len(letters)), add_special_tokens=False)
            if (spent := time.thread_time() - begun) > _MOST_SECONDS:
                fault = f"{path}: {length:,} {kind} take {spent:.1f} s of the processor, more than {_MOST_SECONDS} s"
                raise UserError(f"{fault}; its normalizer or pre_tokenizer has a slow pattern, so take another file.")
            if spent * (_LENGTHS[-1] / length) ** 3 < _MOST_SECONDS:
                break


def _existing(path: str | Path) -> Path:
    path = Path(path)
    if not path.exists():
        raise UserError(f"{path}: no such tokenizer file or folder.")
    return path
