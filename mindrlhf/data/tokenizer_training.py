"""Training of a small Qwen2-style tokenizer: byte-level BPE, single digits."""

import json
from collections.abc import Iterable

from tokenizers import models, pre_tokenizers, trainers

from mindrlhf.data.tokenizer import Tokenizer, bare_core
from mindrlhf.errors import UserError
from mindrlhf.models.families import VOCABULARY

CHAT_TOKENS = VOCABULARY.control[:3]  # end of text, begin and end of a turn


def train_tokenizer(texts: Iterable[str], size: int) -> Tokenizer:
    """Train a tokenizer of at most `size` ids on texts.

    The ids are 256 bytes, merges learnt from `texts`, then `<|endoftext|>` (which pads), `<|im_start|>` and
    `<|im_end|>` (which ends an answer). UserError when `size` is too small for the bytes.
    """
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    least = len(alphabet) + len(CHAT_TOKENS)
    if size < least:
        raise UserError(f"--tokenizer_vocab_size {size}: should be {least} or more, for the bytes and special tokens.")
    core = bare_core(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=size - len(CHAT_TOKENS), initial_alphabet=sorted(alphabet), show_progress=False
    )
    core.train_from_iterator(texts, trainer)
    learnt = json.loads(core.to_str())["model"]
    model = models.BPE(learnt["vocab"], [tuple(pair) for pair in learnt["merges"]])
    first = len(learnt["vocab"])
    config = {
        **VOCABULARY.config,
        "eos_token": CHAT_TOKENS[2],
        "added_tokens_decoder": {
            str(first + offset): {"content": token, "normalized": False, "special": True}
            for offset, token in enumerate(CHAT_TOKENS)
        },
    }
    return Tokenizer.from_bpe(model, config, "the trained tokenizer")
