"""Damaged GGUF files, each refused with a sentence or read as the same model; what is not read, and why."""

import tracemalloc

import gguf
import gguf_files
import numpy as np
import pytest
from small_model import small_config

from mindrlhf.checkpoint.gguf.file import read_gguf
from mindrlhf.checkpoint.gguf.folder import open_gguf
from mindrlhf.checkpoint.gguf.model import read_weights
from mindrlhf.checkpoint.gguf.tokenizer import read_tokenizer
from mindrlhf.errors import UserError

CASES, PARTS = 300, 6
TEXT = "he hehe 12 <|im_end|> ü"
MOST_BYTES = 64 << 20
LLAMA = {"family": "llama", "attention_bias": False, "vocab_size": 264}


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A small whole file of Q8_0 blocks."""
    path = tmp_path_factory.mktemp("small") / "model.gguf"
    gguf_files.write_gguf(path, small_config(**LLAMA, intermediate_size=64), "Q8_0")
    return path


def model_of(path):
    """All that is read: architecture, tensors, and ids of a text."""
    content, config = open_gguf(path)
    tokenizer = read_tokenizer(content)
    arrays = {spec.name: array for spec, array in read_weights(content, config)}
    return config, arrays, tokenizer.encode(TEXT), tokenizer.config


def model_or_sentence(path):
    try:
        return model_of(path)
    except UserError as error:
        return str(error)


def is_same(one, other) -> bool:
    alike = all(np.array_equal(array, other[1].get(name)) for name, array in one[1].items())
    return alike and one[0] == other[0] and one[2:] == other[2:]


def damaged(content: bytes, head: int, draw: np.random.Generator) -> tuple[str, bytes]:
    """(kind of damage, content) with one fault in the head or a length that is not the file's."""
    place = int(draw.integers(0, head))
    kind = ("cut", "lost", "inserted", "number", "huge", "bit", "zeros")[draw.integers(0, 7)]
    few = int(draw.integers(1, 64))
    return kind, {
        "cut": lambda: content[: int(draw.integers(0, len(content)))],
        "lost": lambda: content[:place] + content[place + few :],
        "inserted": lambda: content[:place] + draw.bytes(few) + content[place:],
        "number": lambda: content[:place] + draw.bytes(4) + content[place + 4 :],
        "huge": lambda: (
            content[:place] + (1 << int(draw.integers(24, 64))).to_bytes(8, "little") + content[place + 8 :]
        ),
        "bit": lambda: (
            content[:place] + bytes([content[place] ^ (1 << int(draw.integers(0, 8)))]) + content[place + 1 :]
        ),
        "zeros": lambda: content[:place] + bytes(few) + content[place + few :],
    }[kind]()


@pytest.mark.parametrize("part", range(PARTS))
def test_damage_gives_a_sentence_or_a_whole_model(small, tmp_path, part):
    content, expected = small.read_bytes(), model_of(small)
    head = min(tensor.offset for tensor in read_gguf(small).tensors.values())
    counts = {"sentence": 0, "same": 0, "value": 0}
    for seed in range(part * CASES // PARTS, (part + 1) * CASES // PARTS):
        kind, changed = damaged(content, head, np.random.default_rng(seed))
        path = tmp_path / "model.gguf"
        path.write_bytes(changed)
        tracemalloc.start()
        found = model_or_sentence(path)
        if isinstance(found, str):
            counts["sentence"] += 1
            assert found.startswith(str(path)), (seed, kind, found)
        else:
            # The format has no checksum: another letter or number of the same length cannot be seen.
            counts["same" if is_same(found, expected) else "value"] += 1
            assert is_same(found, expected) or kind in ("number", "huge", "bit", "zeros"), (seed, kind)
            assert found[1].keys() == expected[1].keys(), (seed, kind)
            assert all(np.isfinite(array).all() for array in found[1].values()), (seed, kind)
        assert tracemalloc.get_traced_memory()[1] < MOST_BYTES, (seed, kind)
        tracemalloc.stop()
    print(counts)
    assert counts["sentence"] > CASES // PARTS // 2


def test_whole_file_is_read(small):
    config, arrays, ids, settings = model_of(small)
    assert (config.family, config.eos_token_ids, config.pad_token_id) == ("llama", (260,), 258)
    assert ids[:2] == [256, 257]
    assert 260 in ids
    assert settings["chat_template"].startswith("{% for message")
    assert sum(array.size for array in arrays.values()) > 30_000


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"general.architecture": "gemma3"}, "is 'gemma3', and qwen2, qwen3, llama, qwen3moe are read"),
        ({"split.count": 3}, "is one of 3 parts; join them with `llama-gguf-split --merge`"),
        ({"general.type": "adapter"}, "holds a model's 'adapter', and no model"),
        ({"llama.embedding_length": None}, "lacks llama.embedding_length in its metadata"),
        ({"llama.embedding_length": 64}, "has shape [264, 32], and its metadata ask for [264, 64]"),
        ({"llama.block_count": 3}, "lacks blk.2.attn_norm.weight and 8 more"),
        ({"llama.block_count": 1}, "holds blk.1.attn_norm.weight and 8 more"),
        ({"llama.attention.head_count": 0}, "llama.attention.head_count is 0, and must be a whole number, at least 1"),
        ({"llama.expert_count": 8}, "llama.expert_count is 8, which is not supported"),
        ({"llama.rope.scaling.type": "yarn"}, "llama.rope.scaling.type is 'yarn', which is not supported"),
        ({"llama.rope.dimension_count": 4}, "llama.rope.dimension_count is 4, and heads have 8 numbers"),
        ({"tokenizer.ggml.model": "llama"}, "its tokenizer is 'llama', and byte-level BPE (gpt2) is read"),
        ({"tokenizer.ggml.pre": "tekken"}, "tokenizer.ggml.pre is 'tekken', and qwen2, "),
        ({"tokenizer.ggml.merges": ["h e", "hehe"]}, "tokenizer.ggml.merges has 'hehe', which is no pair"),
        ({"tokenizer.ggml.merges": ["h z"]}, "tokenizer.ggml.merges has h z, and tokenizer.ggml.tokens lacks"),
        ({"tokenizer.ggml.eos_token_id": 264}, "eos_token_id is 264, and the tokens are 0 to 263"),
        ({"tokenizer.ggml.token_type": [1, 1]}, "tokenizer.ggml.token_type has not one entry for each of 264 tokens"),
    ],
)  # fmt: skip
def test_what_is_not_read_is_said(tmp_path, changes, message):
    path = tmp_path / "model.gguf"
    architecture = changes.pop("general.architecture", "llama")
    config = small_config(**LLAMA)
    gguf_files.write_gguf(path, config, "F32", **changes)
    if architecture != "llama":
        path.write_bytes(path.read_bytes().replace(b"\5\0\0\0\0\0\0\0llama", b"\6\0\0\0\0\0\0\0gemma3", 1))
    with pytest.raises(UserError) as error:
        model_of(path)
    assert message in str(error.value)


def test_a_type_that_is_not_read_is_named(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_tensor("token_embd.weight", np.zeros((4, 18), np.uint8), raw_dtype=gguf.GGMLQuantizationType.IQ4_NL)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UserError, match=r"has the type IQ4_NL, and F32, F16, .* are read; quantise it as Q8_0"):
        read_gguf(tmp_path / "model.gguf")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "does not begin as a GGUF file"),
        (b"version https://git-lfs", "is a Git LFS pointer"),
        (b"GGUF\x01\0\0\0", "of version 1, and versions 2 and 3 are read"),
        (b"GGUF\0\0\0\x03" + bytes(40), "of a big-endian machine"),
        (b"GGUF\x03\0\0\0", "is damaged"),
    ],
)
def test_other_files_are_refused(tmp_path, content, message):
    (tmp_path / "model.gguf").write_bytes(content)
    with pytest.raises(UserError, match=message):
        read_gguf(tmp_path / "model.gguf")
