"""Tokenizer interface over a sentencepiece `tokenizer.model`."""

import re
import shutil
from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from mindrlhf.data.tokenizer_config import CONFIG_NAME, ConfiguredTokenizer, added_tokens, read_config
from mindrlhf.errors import UserError
from mindrlhf.files.atomic import atomic_files
from mindrlhf.files.json import write_json


class SentencePieceTokenizer(ConfiguredTokenizer):
    """Tokenizer of a sentencepiece model with control pieces and added tokens.

    Text between these special tokens is encoded piece by piece, with the model's own normaliser and dummy prefix.
    """

    def __init__(self, path: Path, config: dict[str, Any]):
        from sentencepiece import SentencePieceProcessor

        self.config = config
        self._where = str(path)
        self._path = path
        self._pieces = SentencePieceProcessor()
        try:
            self._pieces.Load(str(path))
        except (OSError, RuntimeError):
            raise UserError(f"{path}: not a sentencepiece model.") from None
        added = added_tokens(config, self._where)
        control = filter(self._pieces.IsControl, range(self._pieces.GetPieceSize()))
        self._special = {self._pieces.IdToPiece(i): i for i in control} | {token.content: i for i, token in added}
        self._shown = {i for i, token in added if not token.special}  # kept when special tokens are skipped
        self._special_by_id = {token_id: token for token, token_id in self._special.items()}
        # The longest first: a token wins over another one that is its beginning.
        names = sorted(self._special, key=len, reverse=True)
        self._split = re.compile(f"({'|'.join(map(re.escape, names)) or '(?!)'})")

    @classmethod
    def from_file(cls, path: str | Path) -> "SentencePieceTokenizer":
        """Open a `tokenizer.model` and the `tokenizer_config.json` next to it."""
        path = Path(path)
        return cls(path, read_config(path.parent) or {"eos_token": "</s>"})

    def encode(self, text: str) -> list[int]:
        ids = []
        for part in self._split.split(text):
            if part in self._special:
                ids.append(self._special[part])
            elif part:
                ids.extend(self._pieces.EncodeAsIds(part))
        return ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [self.encode(text) for text in texts]

    def decode(self, ids: Iterable[int] | np.ndarray, skip_special_tokens: bool = False) -> str:
        known = [int(i) for i in ids if int(i) in self._special_by_id or 0 <= int(i) < self._pieces.GetPieceSize()]
        text = []
        for special, run in groupby(known, key=self._special_by_id.__contains__):
            if not special:
                text.append(self._pieces.DecodeIds(list(run)))
            else:
                text.extend(self._special_by_id[i] for i in run if i in self._shown or not skip_special_tokens)
        return "".join(text)

    def token_to_id(self, token: str) -> int | None:
        token_id = self._pieces.PieceToId(token)
        return self._special.get(token, token_id if self._pieces.IdToPiece(token_id) == token else None)

    def id_to_token(self, token_id: int) -> str | None:
        piece = self._pieces.IdToPiece(int(token_id)) if 0 <= token_id < self._pieces.GetPieceSize() else None
        return self._special_by_id.get(int(token_id), piece)

    def _begin_ids(self) -> list[int]:
        """Take the model's begin token, which HF's classes for such files add."""
        begin = self._pieces.bos_id()
        return [] if begin < 0 else [begin]

    def _added_tokens(self) -> Iterable[tuple[str, bool]]:
        from sentencepiece.sentencepiece_model_pb2 import ModelProto

        kind = ModelProto.SentencePiece.USER_DEFINED
        pieces = ModelProto.FromString(self._pieces.serialized_model_proto()).pieces
        defined = (piece.piece.replace("▁", " ") for piece in pieces if piece.type == kind)
        added = {name: token_id not in self._shown for name, token_id in self._special.items()}
        return (added | dict.fromkeys(defined, True)).items()

    @property
    def size(self) -> int:
        return max([self._pieces.GetPieceSize() - 1, *self._special_by_id]) + 1

    def save(self, directory: str | Path) -> None:
        with atomic_files(directory) as stage:
            shutil.copyfile(self._path, stage / "tokenizer.model")
            write_json(stage / CONFIG_NAME, self.config)
