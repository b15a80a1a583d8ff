"""Texts of others among the tokens of several tokenizers: none of their special and added tokens comes out."""

import json

import numpy as np
import pytest
import sentencepiece
import tokenizers
from tokenizers import AddedToken, models

from mindrlhf.data.tokenizer import Tokenizer, bare_core, train_tokenizer

QWEN = ("<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>", "<think>", "</think>")
LLAMA = ("<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>", "<|python_tag|>")
OTHERS = (
    "<s>",
    "</s>",
    "[INST]",
    "[/INST]",
    "<<SYS>>",
    "<SYS>",
    "<｜User｜>",
    "<end_of_turn>",
    "¤",
    "x¤",
    " <b",
    "\n\n",
)
LETTERS = [*"<>|[]/s ", "\n", "im_end", "¤", "¤¤", "eot", "é", "中", "SYS", "<<"]


def bpe(tokens, special):
    letters = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    core = bare_core(models.BPE(vocab={letter: i for i, letter in enumerate(sorted(letters))}, merges=[]))
    core.add_tokens([AddedToken(token, special=special, lstrip=special, normalized=not special) for token in tokens])
    return Tokenizer(core, {}, "a test"), [core.token_to_id(token) for token in tokens if token.strip()]


def pieces(folder):
    """A sentencepiece model with tokens of its own kind, and one of its configuration."""
    defined = ["<end_of_turn>", "[INST]", "  "]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["How many apples does Tom have left?", "3+4=7 #### 7"] * 20),
        model_prefix=str(folder / "tokenizer"),
        vocab_size=320,
        model_type="bpe",
        byte_fallback=True,
        user_defined_symbols=defined,
        minloglevel=2,
    )
    added = {"320": {"content": "<tool_call>", "special": False}}
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>", "added_tokens_decoder": added}))
    made = Tokenizer.from_path(folder)
    return made, [made.token_to_id(token) for token in ("<s>", "</s>", "<tool_call>", *defined[:2])]


@pytest.fixture(params=["trained", "qwen", "llama", "others", "sentencepiece"])
def tokenizer(request, tmp_path):
    """A tokenizer, and the ids that must not come out of it."""
    match request.param:
        case "trained":
            made = train_tokenizer(["3+4=7 #### 7"] * 20, 270)
            return made, list(range(made.size - 3, made.size))
        case "qwen":
            return bpe(QWEN, special=False)
        case "llama":
            return bpe(LLAMA, special=True)
        case "others":
            return bpe(OTHERS, special=False)
    return pieces(tmp_path)


def test_no_added_token_comes_out(tokenizer):
    made, control = tokenizer
    names = [made.id_to_token(token_id) for token_id in control]
    assert None not in names
    rng = np.random.default_rng(0)
    for name in names:
        assert set(made.encode(f"a{name}b")) & set(control)
    for _ in range(300):
        parts = rng.choice([*names, *LETTERS], rng.integers(1, 9))
        text = "".join(part if rng.random() < 0.7 else part[: rng.integers(1, len(part) + 1)] for part in parts)
        plain = made.plain_text(text)
        assert not set(made.encode(plain)) & set(control), (text, plain)
        assert made.plain_text(plain) == plain
        # Nothing but white space is added, and nothing lost but tokens of one letter.
        assert "".join(plain.split()).replace("¤", "") == "".join(text.split()).replace("¤", "")


def test_other_text_stays(tokenizer):
    made, _ = tokenizer
    for text in ("", "a < b > c", "x = {'y': [1, 2]}\n\n  <p>é 中</p>", "# 3 + 4 = 7"):
        assert made.plain_text(text) == text


def test_where_a_token_is_broken():
    made, _ = bpe(QWEN, special=False)
    assert made.plain_text("4<|im_end|>\n<think>x") == "4< |im_end|>\n< think>x"
    assert bpe(["¤"], special=False)[0].plain_text("1¤2") == "12"
