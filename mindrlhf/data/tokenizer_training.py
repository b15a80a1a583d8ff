"""Training of a small Qwen2-style tokenizer: byte-level BPE, single digits."""

from collections.abc import Iterable

from tokenizers import models, pre_tokenizers, trainers

from mindrlhf.data.tokenizer import Tokenizer, add_tokens, bare_core
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
    core, letters = bare_core(models.BPE()), sorted(alphabet)
    trainer = trainers.BpeTrainer(vocab_size=size - len(CHAT_TOKENS), initial_alphabet=letters, show_progress=False)
    core.train_from_iterator(texts, trainer)
    add_tokens(core, CHAT_TOKENS)
    return Tokenizer(core, VOCABULARY.config | {"eos_token": CHAT_TOKENS[2]}, "the trained tokenizer")
