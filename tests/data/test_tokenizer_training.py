"""The tokenizer that is trained for the quick start."""

import pytest

from mindrlhf.data.tasks import arithmetic
from mindrlhf.data.tokenizer import train_tokenizer
from mindrlhf.errors import UserError


@pytest.fixture(scope="module")
def texts():
    return [text for row in arithmetic.generate(200, seed=0) for text in row.values()]


def test_size_and_special_tokens(texts):
    tokenizer = train_tokenizer(texts, 350)
    assert tokenizer.size == 350
    assert tokenizer.encode("<|endoftext|><|im_start|><|im_end|>") == [347, 348, 349]
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (347, 349)


def test_learns_words_but_keeps_digits_apart(texts):
    tokenizer = train_tokenizer(texts, 500)
    assert len(tokenizer.encode("How many apples")) <= 4
    assert len(tokenizer.encode("1234")) == 4
    assert tokenizer.decode(tokenizer.encode("any text: 中文 é ☃")) == "any text: 中文 é ☃"


def test_same_texts_give_the_same_tokenizer(texts):
    first, second = train_tokenizer(texts, 400), train_tokenizer(texts, 400)
    assert [first.id_to_token(i) for i in range(400)] == [second.id_to_token(i) for i in range(400)]
    assert first.encode_batch(texts) == second.encode_batch(texts)


def test_stops_where_nothing_is_left_to_merge():
    assert train_tokenizer(["ab ab ab"], 10_000).size < 300


def test_size_below_the_bytes():
    with pytest.raises(UserError, match="--tokenizer_vocab_size 258: should be 259 or more"):
        train_tokenizer(["a"], 258)
