"""Words in place of images, so that rows with images are read as texts."""

import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from mindrlhf.data.pictures import IMAGE, TEXT_PART


class StandIn:
    """Random word that no text has."""

    def __init__(self) -> None:
        self.word = secrets.token_hex()

    def texts(self, messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """Write contents that are parts as texts."""
        return [
            {**message, "content": "".join(map(self._word, message["content"]))}
            if isinstance(message.get("content"), list)
            else message
            for message in messages
        ]

    def parts(self, message: dict[str, Any]) -> dict[str, Any]:
        """Undo `texts` for a message; one without an image keeps its text."""
        first, *others = (message.get("content") or "").split(self.word)
        if not others:
            return message
        parts = [{"type": TEXT_PART, "text": first}]
        for text in others:
            parts += [{"type": IMAGE}, {"type": TEXT_PART, "text": text}]
        return message | {"content": [part for part in parts if part.get("text") != ""]}

    def _word(self, part: Mapping[str, Any]) -> str:
        return part["text"] if part["type"] == TEXT_PART else self.word
