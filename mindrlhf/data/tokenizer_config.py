"""Settings of a tokenizer's folder: special tokens, chat templates and the ends of texts."""

import copy
import re
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import AddedToken

from mindrlhf.errors import UserError
from mindrlhf.files.json import read_json
from mindrlhf.files.text import is_there, read_text
from mindrlhf.models.families import DEFAULT, FAMILIES

CONFIG_NAME = "tokenizer_config.json"
TOKENS_NAME = "special_tokens_map.json"  # of older folders; newer ones have its content in tokenizer_config.json
TEMPLATE_NAME = "chat_template.jinja"
TEMPLATES_FOLDER = "additional_chat_templates"
DEFAULT_TEMPLATE, TOOL_TEMPLATE = "default", "tool_use"  # names of chat templates, where a tokenizer has several
TOKEN_KEYS = ("eos_token", "pad_token", "bos_token")
ADDED_TOKEN_KEYS = ("content", "lstrip", "normalized", "rstrip", "single_word", "special")


class ConfiguredTokenizer:
    """Tokenizer with the content of its `tokenizer_config.json` in `config`."""

    config: dict[str, Any]
    _where: str  # its origin, for messages

    def token_to_id(self, token: str) -> int | None:
        """Look up the id of a token; None outside the vocabulary."""
        raise NotImplementedError

    def encode(self, text: str) -> list[int]:
        """Encode text; special tokens written in it become their ids."""
        raise NotImplementedError

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode each text."""
        raise NotImplementedError

    def encode_prompt(self, text: str) -> list[int]:
        """Encode a text that no chat template wrote; it begins with `begin_ids`, once."""
        return self.encode_prompts([text])[0]

    def encode_prompts(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode texts that no chat template wrote."""
        begin = self.begin_ids
        return [ids if ids[: len(begin)] == begin else begin + ids for ids in self.encode_batch(texts)]

    @cached_property
    def begin_ids(self) -> list[int]:
        """Ids in front of every text: the begin token, if the tokenizer adds it."""
        adds = self.config.get("add_bos_token")
        if adds is None:
            return self._begin_ids()
        token_id = self.token_to_id(token_text(self.config.get("bos_token")) or "")
        return [token_id] if adds and token_id is not None else []

    def _begin_ids(self) -> list[int]:
        """Find the `begin_ids` of a tokenizer without `add_bos_token`."""
        raise NotImplementedError

    def plain_text(self, text: str, markup: bool = False) -> str:
        """Break up special and added tokens in a text.

        `encode` then gives none of them. A space separates a token's first character from the rest; without a rest, the
        character is left out. Tokens of white space stay. markup: whether only control tokens are broken up: special
        tokens, and added ones of the chat template that are no tags such as `<think>`.
        """
        tokens = self._control_tokens if markup else self._tokens
        while (plain := tokens.sub(_broken, text)) != text:
            text = plain
        return text

    @cached_property
    def _tokens(self) -> re.Pattern[str]:
        return _any_of({*(token for token, _ in self._added_tokens()), *self._configured_tokens()})

    @cached_property
    def _control_tokens(self) -> re.Pattern[str]:
        added = dict(self._added_tokens())
        written = "\n".join(self.chat_templates.values())
        control = {
            token for token in added if (added[token] or token in written) and not _is_markup(token, added[token])
        }
        return _any_of(token for token in control.union(self._configured_tokens()) if len(token) > 1)

    def _configured_tokens(self) -> set[str]:
        return {token for key in TOKEN_KEYS if (token := token_text(self.config.get(key)))}

    def _added_tokens(self) -> Iterable[tuple[str, bool]]:
        """List added and special tokens, and whether they are special."""
        raise NotImplementedError

    @cached_property
    def _end_tokens(self) -> dict[str, int]:
        """Tokens that end a response: the tokenizer's, and those of the model families."""
        names = [token for family in FAMILIES.values() for token in family.end_tokens]
        ids = {name: token_id for name in names if (token_id := self.token_to_id(name)) is not None}
        return ids | {self.id_to_token(self.eos_token_id): self.eos_token_id}

    def ended(self, ids: list[int]) -> list[int]:
        """Append the end token to an answer that lacks one."""
        return ids if ids and ids[-1] in self._end_tokens.values() else [*ids, self.eos_token_id]

    def without_end(self, text: str) -> str:
        """Leave out the end token behind an answer, with the white space around it."""
        end = next((token for token in self._end_tokens if text.rstrip().endswith(token)), None)
        return text if end is None else text.rstrip().removesuffix(end).rstrip()

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
    def chat_templates(self) -> dict[str, str]:
        """The tokenizer's own jinja2 chat templates by name."""
        found = self.config.get("chat_template") or {}
        if isinstance(found, list):  # as HF writes several
            found = {each["name"]: each["template"] for each in found}
        return {DEFAULT_TEMPLATE: found} if isinstance(found, str) else found

    @property
    def chat_template(self) -> str | None:
        """The chat template of conversations without tools, or None.

        UserError if none of several is the default.
        """
        found = self.chat_templates
        if found and DEFAULT_TEMPLATE not in found:
            raise UserError(
                f"{self._where}: has the chat templates {', '.join(found)}, and none is named {DEFAULT_TEMPLATE}; "
                "choose one by its name, as the variable chat_template of data.chat_template_kwargs."
            )
        return found.get(DEFAULT_TEMPLATE)

    def chat_template_for(self, tools: bool) -> str | None:
        """Choose the chat template of conversations, with tools or without."""
        own = self.chat_templates.get(TOOL_TEMPLATE) if tools else None
        return own or self.chat_template

    def with_chat_template(self, template: str) -> "ConfiguredTokenizer":
        """Copy with one chat template.

        template: the name of one of its own, or jinja2. UserError for an unknown name.
        """
        if template not in self.chat_templates and "{" not in template:
            known = ", ".join(self.chat_templates) or "none"
            raise UserError(f"{self._where}: has no chat template {template!r} (its own: {known}); name one of these.")
        other = copy.copy(self)
        other.config = self.config | {"chat_template": self.chat_templates.get(template, template)}
        other.__dict__.pop("_control_tokens", None)
        return other


_TAG = re.compile(r"</?(\w+)>")
_MARKUP = ("think", "answer", "tool_call", "tool_response", "tools")  # tags that are no control, special or not


def _is_markup(token: str, special: bool) -> bool:
    tag = _TAG.fullmatch(token)
    return tag is not None and (not special or tag[1] in _MARKUP)


def _any_of(tokens: Iterable[str]) -> re.Pattern[str]:
    """Compile a pattern of these tokens, without those of white space."""
    found = sorted(filter(str.strip, tokens), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, found)) or "(?!)")


def _broken(token: re.Match[str]) -> str:
    before, rest = re.match(r"(\s*\S)(.*)", token[0], re.DOTALL).groups()
    return f"{before} {rest}" if rest[:1].strip() else before[:-1] + rest


def read_config(folder: Path) -> dict[str, Any] | None:
    """Read the settings of a tokenizer's folder as one configuration, or None.

    `special_tokens_map.json` gives tokens that the configuration lacks, and decides where the configuration lists no
    added tokens. A `chat_template.jinja` replaces the configuration's template, and files in
    `additional_chat_templates` are further ones by name.
    """
    config = _settings(folder / CONFIG_NAME)
    tokens = _settings(folder / TOKENS_NAME)
    templates = _template_files(folder)
    if config is None and tokens is None and not templates:
        return None
    config = config or {}
    tokens = tokens or {}
    config = tokens | config if "added_tokens_decoder" in config else config | tokens
    added_tokens(config, str(folder))
    _check_templates(config.get("chat_template"), str(folder / CONFIG_NAME))
    if set(templates) == {DEFAULT_TEMPLATE}:
        config["chat_template"] = templates[DEFAULT_TEMPLATE]
    elif templates:
        own = config.get("chat_template")
        templates = {DEFAULT_TEMPLATE: own} | templates if isinstance(own, str) else templates
        config["chat_template"] = [{"name": name, "template": text} for name, text in templates.items()]
    return config


def _settings(path: Path) -> dict[str, Any] | None:
    """Read a file of settings and check its tokens; None without one."""
    if not is_there(path):
        return None
    config = read_json(path)
    for key in TOKEN_KEYS:
        if not isinstance(token_text(config.get(key)), str | None):
            raise UserError(f"{path}: {key} is {config[key]!r:.60}, and must be text or an object with a content.")
    return config


def _template_files(folder: Path) -> dict[str, str]:
    """Read the chat templates that have files of their own, by name."""
    paths = {path.stem: path for path in sorted((folder / TEMPLATES_FOLDER).glob("*.jinja"))}
    if is_there(folder / TEMPLATE_NAME):
        paths = {DEFAULT_TEMPLATE: folder / TEMPLATE_NAME} | paths
    return {name: read_text(path, "a jinja template") for name, path in paths.items()}


def _check_templates(template: Any, where: str) -> None:
    """Refuse a `chat_template` that is neither text nor a list of named templates."""
    named = template if isinstance(template, list) else []
    texts = [[each.get("name"), each.get("template")] if isinstance(each, dict) else [None] for each in named]
    if not (isinstance(template, str | list | None) and all(isinstance(text, str) for pair in texts for text in pair)):
        raise UserError(f"{where}: chat_template should be text, or a list of objects with name and template.")


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
