"""`tokenizer_config.json` of a model folder: special tokens and the chat template."""

import re
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import AddedToken

from mindrlhf.errors import UserError
from mindrlhf.files.json import read_json
from mindrlhf.files.text import is_there, read_text
from mindrlhf.models.families import DEFAULT, FAMILIES

CONFIG_NAME = "tokenizer_config.json"
TOKEN_KEYS = ("eos_token", "pad_token", "bos_token")
ADDED_TOKEN_KEYS = ("content", "lstrip", "normalized", "rstrip", "single_word", "special")


class ConfiguredTokenizer:
    """Tokenizer with the content of its `tokenizer_config.json` in `config`."""

    config: dict[str, Any]
    _where: str  # its origin, for messages

    def token_to_id(self, token: str) -> int | None:
        """Look up the id of a token; None outside the vocabulary."""
        raise NotImplementedError

    def plain_text(self, text: str) -> str:
        """Break up special and added tokens in a text.

        `encode` then gives none of them. A space separates a token's first character from the rest; without a rest, the
        character is left out. Tokens of white space stay.
        """
        while (plain := self._control_tokens.sub(_broken, text)) != text:
            text = plain
        return text

    @cached_property
    def _control_tokens(self) -> re.Pattern[str]:
        configured = filter(None, (token_text(self.config.get(key)) for key in TOKEN_KEYS))
        tokens = {token for token in (*self._added_tokens(), *configured) if token.strip()}
        return re.compile("|".join(map(re.escape, sorted(tokens, key=len, reverse=True))) or "(?!)")

    def _added_tokens(self) -> Iterable[str]:
        """List the tokens that are not pieces of ordinary text."""
        raise NotImplementedError

    @property
    def eos_token_id(self) -> int:
        """Id of `eos_token`, or of a family's end of text; UserError without either."""
        ends = (family.end_of_text for family in FAMILIES.values())
        known = (token for token in ends if self.token_to_id(token) is not None)
        return self._known_id("end", token_text(self.config.get("eos_token")) or next(known, DEFAULT.end_of_text))

    @property
    def pad_token_id(self) -> int:
        """Id of `pad_token`, or of the end token if none is configured."""
        token = token_text(self.config.get("pad_token"))
        return self.eos_token_id if token is None else self._known_id("pad", token)

    def _known_id(self, kind: str, token: str) -> int:
        token_id = self.token_to_id(token)
        if token_id is None:
            raise UserError(f"{self._where}: {kind} token {token} is not in it; name another in {CONFIG_NAME}.")
        return token_id

    @property
    def chat_template(self) -> str | None:
        """The tokenizer's own jinja2 chat template, or None."""
        template = self.config.get("chat_template")
        return template if isinstance(template, str) else None


def _broken(token: re.Match[str]) -> str:
    before, rest = re.match(r"(\s*\S)(.*)", token[0], re.DOTALL).groups()
    return f"{before} {rest}" if rest[:1].strip() else before[:-1] + rest


def read_config(folder: Path) -> dict[str, Any] | None:
    """Read a folder's `tokenizer_config.json` with its `chat_template.jinja`, or None."""
    path = folder / CONFIG_NAME
    if not is_there(path):
        return None
    config = read_json(path)
    for key in TOKEN_KEYS:
        if not isinstance(token_text(config.get(key)), str | None):
            raise UserError(f"{path}: {key} is {config[key]!r:.60}, and must be text or an object with a content.")
    added_tokens(config, str(folder))
    chat_template = folder / "chat_template.jinja"
    if is_there(chat_template):
        config["chat_template"] = read_text(chat_template, "a jinja template")
    return config


def token_text(token: str | dict[str, Any] | None) -> str | None:
    """Read a token of `tokenizer_config.json`: a string, or an object with `content`."""
    return token.get("content") if isinstance(token, dict) else token


def added_tokens(config: dict[str, Any], where: str) -> list[tuple[int, AddedToken]]:
    """List (id, token) of `added_tokens_decoder` in the order of ids."""
    try:
        entries = {int(token_id): entry for token_id, entry in config.get("added_tokens_decoder", {}).items()}
        return [
            (token_id, AddedToken(**{key: entry[key] for key in ADDED_TOKEN_KEYS if key in entry}))
            for token_id, entry in sorted(entries.items())
        ]
    except (AttributeError, TypeError, ValueError, KeyError) as error:
        raise UserError(f"{where}: added_tokens_decoder in {CONFIG_NAME} is not as HF writes it ({error}).") from None
