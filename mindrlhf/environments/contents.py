"""Answers of tools and environments as texts of messages, and the pictures among them.

A picture is written with the model's own tokens, so that templates which take texts alone show it too. Then its token
is repeated for all tokens of the picture.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias, Union

import numpy as np

from mindrlhf.configs.vision import VisionConfig
from mindrlhf.data.pictures import token_repeats
from mindrlhf.data.turns import TurnTemplate
from mindrlhf.errors import UserError

if TYPE_CHECKING:  # it imports Pillow, which text does not need
    from mindrlhf.images.processor import Picture

Content: TypeAlias = Union[str, "tuple[str | Picture, ...]"]
"""Text, or texts and pictures in their order."""


class ContentWriter:
    """Writer of contents for a chat template.

    image: text of an image; vision: of a model that is shown pictures, or None. Raises UserError for a template that
    does not write them.
    """

    def __init__(self, template: TurnTemplate, image: str | None = None, vision: VisionConfig | None = None):
        self._template = template
        self._image = image
        self._vision = vision
        if vision is not None:
            for role in ("tool", "user"):
                self._check(role, vision.image_token_id)

    @property
    def sees(self) -> bool:
        """True if contents may have pictures."""
        return self._vision is not None

    def text(self, content: Content) -> str:
        """Write a content; control tokens in its texts are broken up."""
        parts = (content,) if isinstance(content, str) else content
        return "".join(
            self._template.plain_text(part) if isinstance(part, str) else self._image or "" for part in parts
        )

    def wide(self, ids: np.ndarray, contents: Sequence[Content]) -> tuple[np.ndarray, tuple["Picture", ...]]:
        """Repeat the tokens of pictures in the ids of some contents.

        Returns the pictures, too.
        """
        several = (content for content in contents if not isinstance(content, str))
        pictures = tuple(part for content in several for part in content if not isinstance(part, str))
        if not (pictures and self._vision):
            return ids, ()
        repeats = token_repeats(ids, [picture.tokens for picture in pictures], self._vision.image_token_id)
        return np.repeat(ids, repeats), pictures

    def _check(self, role: str, token: int) -> None:
        """Raise UserError for an image that is not one token with text behind it."""
        ids = self._template.answers([{"role": role, "content": self._image}])
        if np.count_nonzero(ids == token) != 1 or ids[-1] == token:
            found = f"the chat template or the tokenizer does not write an image in a message of the role {role}"
            raise UserError(f"rollout.tool_images is True, and {found}; give one that does, or set it to False.")
