"""Tokenizers from GGUF files: ids as llama.cpp's, special tokens, templates."""

import json

import gguf_files
import pytest
from llama_cpp_python import TOKENIZE, run_llama_cpp, smollm_file
from many_texts import many_texts
from small_model import small_config
from tokenizers import Tokenizer as Core
from tokenizers import models, pre_tokenizers, trainers

from mindrlhf.checkpoint.gguf.file import read_gguf
from mindrlhf.checkpoint.gguf.pre_tokenizers import KNOWN, NAMED, recognised
from mindrlhf.checkpoint.gguf.tokenizer import read_tokenizer

CONTROL = ("<|begin|>", "<|im_end|>")
CONFIG = small_config(family="llama", attention_bias=False, vocab_size=264)
COUNT, VOCABULARY = 5000, 1200


def opened(path, config=CONFIG, **changes):
    gguf_files.write_gguf(path, config, "F32", **changes)
    return read_tokenizer(read_gguf(path))


def trained(pre, path):
    """A file with a vocabulary that was learnt with a pre-tokenizer, and control tokens behind it."""
    core = Core(models.BPE())
    core.pre_tokenizer = pre.build()
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, initial_alphabet=letters, show_progress=False)
    core.train_from_iterator(many_texts(2000, (), seed=1), trainer)
    model = json.loads(core.to_str())["model"]
    tokens = [token for token, _ in sorted(model["vocab"].items(), key=lambda pair: pair[1])]
    changes = {
        "tokens": [*tokens, *CONTROL, "<tool_call>"],
        "token_type": [1] * len(tokens) + [3] * len(CONTROL) + [4],
        "merges": [" ".join(merge) for merge in model["merges"]],
        "pre": pre.names[0],
        "bos_token_id": len(tokens),
        "eos_token_id": len(tokens) + 1,
        "padding_token_id": len(tokens) + 1,
        "add_bos_token": None,
    }
    config = CONFIG.model_copy(update={"vocab_size": len(tokens) + 3})
    return opened(path, config, **{f"tokenizer.ggml.{key}": value for key, value in changes.items()})


@pytest.mark.parametrize("pre", KNOWN, ids=lambda pre: pre.names[0])
def test_each_pre_tokenizer_is_recognised_again(pre, tmp_path):
    tokenizer = trained(pre, tmp_path / "model.gguf")
    assert recognised(json.loads(tokenizer._core.to_str())) is pre
    text = "It's 1234 <|im_end|> of <tool_call> naïve 日本\n\n  x = [1,  2]"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=True) == text.replace("<|im_end|>", "")
    begin = [tokenizer.token_to_id("<|begin|>")] if pre.begins else []
    assert tokenizer.begin_ids == begin
    assert tokenizer._core.encode("a").ids == begin + tokenizer.encode("a")
    assert tokenizer.plain_text("<|im_end|>") != "<|im_end|>"


def test_names_are_those_of_one_pre_tokenizer():
    assert len(NAMED) == sum(len(pre.names) for pre in KNOWN)


def test_templates_have_names(tmp_path):
    tokenizer = opened(
        tmp_path / "model.gguf",
        **{"tokenizer.chat_template.tool_use": "tools", "tokenizer.chat_templates": ["tool_use"]},
    )
    assert tokenizer.chat_template.startswith("{% for message")
    assert tokenizer.chat_template_for(tools=True) == "tools"
    assert opened(tmp_path / "none.gguf", **{"tokenizer.chat_template": None}).chat_template is None


def test_end_tokens_are_special_whatever_the_file_calls_them(tmp_path):
    tokenizer = opened(tmp_path / "model.gguf", **{"tokenizer.ggml.token_type": [1] * 264})
    assert tokenizer.encode("<|im_end|>") == [260]
    assert tokenizer.eos_token_id == 260
    assert tokenizer.size == 264
    assert opened(tmp_path / "padded.gguf").size == 261


@pytest.mark.slow
@pytest.mark.parametrize("pre", KNOWN, ids=lambda pre: pre.names[0])
def test_ids_are_those_of_llama_cpp(pre, tmp_path):
    """With texts in the normal form NFC, where a model's own tokenizer composes and llama.cpp does not."""
    path = tmp_path / "model.gguf"
    tokenizer = trained(pre, path)
    texts = many_texts(COUNT, (*CONTROL, "<tool_call>"), seed=2, composed=pre.composes)
    assert tokenizer.encode_batch(texts) == run_llama_cpp(TOKENIZE, model=path, texts=texts)


@pytest.mark.slow
def test_ids_of_a_real_model_are_those_of_llama_cpp():
    path = smollm_file()
    tokenizer = read_tokenizer(read_gguf(gguf_files.Path(path)))
    texts = many_texts(COUNT, ("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<repo_name>"), seed=3)
    assert tokenizer.encode_batch(texts) == run_llama_cpp(TOKENIZE, model=path, texts=texts)
