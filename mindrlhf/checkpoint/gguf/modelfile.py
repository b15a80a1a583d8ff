"""Ollama's description of a model, beside its GGUF file."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mindrlhf.data.chat import family_chat, render_conversations, token_variables
from mindrlhf.data.tokenizer_config import ConfiguredTokenizer
from mindrlhf.errors import UserError
from mindrlhf.files.atomic import atomic_file
from mindrlhf.files.text import read_text
from mindrlhf.models.families import Chat

NAME = "Modelfile"
FIRST_LINE = "# Written by `mindrlhf export`: `ollama create NAME -f Modelfile`"
# Key of `generation_config.json` -> ollama's parameter.
PARAMETERS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repeat_penalty",
}
SYSTEM, USER = "Some instructions.", "A question?"  # of the conversations that are tried
# Of a tokenizer without a chat template: the prompt as `--template plain` writes it.
PLAIN = "{{ if .System }}{{ .System }}\n\n{{ end }}{{ .Prompt }}\n"


def check_modelfile(folder: Path) -> Path:
    """Find the place of the description. UserError if another program's stands there."""
    path = folder / NAME
    if path.exists() and not read_text(path, "a Modelfile").startswith(FIRST_LINE):
        raise UserError(f"{path}: is not written by `mindrlhf export`, so it stays; give --gguf another folder.")
    return path


def write_modelfile(
    path: Path, tokenizer: ConfiguredTokenizer, ends: tuple[int, ...], sampling: Mapping[str, Any], lines: list[str]
) -> None:
    """Write a description with template, system prompt, end tokens and sampling.

    ends: ids of tokens that end a response. sampling: content of `generation_config.json`. lines: name the files.
    """
    template, system = ollama_template(tokenizer)
    stops = [tokenizer.id_to_token(token) for token in ends]
    content = [FIRST_LINE, *lines]
    if template is None:
        content.append("# No TEMPLATE: ollama chooses one by the chat template in the file.")
    else:
        content.append(f'TEMPLATE """{template}"""')
    content += [f'SYSTEM """{system}"""'] if system else []
    content += [f'PARAMETER stop "{stop}"' for stop in stops if stop]
    content += [f"PARAMETER {name} {sampling[key]:g}" for key, name in PARAMETERS.items() if _is_number(sampling, key)]
    with atomic_file(path) as temporary:
        temporary.write_text("\n".join(content) + "\n", encoding="utf-8")


def _is_number(sampling: Mapping[str, Any], key: str) -> bool:
    value = sampling.get(key)
    return isinstance(value, int | float) and not isinstance(value, bool)


def ollama_template(tokenizer: ConfiguredTokenizer) -> tuple[str | None, str]:
    """Write a tokenizer's chat template in ollama's language, with its own system prompt.

    Only the markup of a family is translated: the template is None if it writes two messages in another way. Without a
    chat template the prompt stays plain.
    """
    own = tokenizer.chat_template
    if own is None:
        return PLAIN, ""
    chat = family_chat(tokenizer)
    if chat is None:
        return None, ""
    asked = {"role": "user", "content": USER}
    tried = [[{"role": "system", "content": SYSTEM}, asked], [asked]]
    conversations = [(messages, "the chat template") for messages in tried]
    try:
        whole, alone = render_conversations(conversations, own, **token_variables(tokenizer))
    except UserError:
        return None, ""
    tail = f"{chat.turn('user', USER)}{chat.before}assistant{chat.between}"
    begins = alone.removeprefix(chat.opening)
    if whole.removeprefix(chat.opening) != chat.turn("system", SYSTEM) + tail or not begins.endswith(tail):
        return None, ""
    system = begins.removesuffix(tail).removeprefix(f"{chat.before}system{chat.between}").removesuffix(chat.after)
    return (None, "") if '"""' in system else (_in_go(chat), system)


def _in_go(chat: Chat) -> str:
    """Write a family's markup as a Go template.

    The system prompt is one of the messages, and ollama puts the begin token in front by itself.
    """
    turn = chat.turn("{{ .Role }}", "{{ .Content }}")
    return f"{{{{ range .Messages }}}}{turn}{{{{ end }}}}{chat.before}assistant{chat.between}"
