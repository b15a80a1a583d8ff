"""Tokenizer: the reference ids of Qwen2.5, round trips, other file forms, damaged files."""

import json
import shutil
import unicodedata

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from slow_cases import few_of
from tokenizers import Regex, pre_tokenizers

from mindrlhf.data import tokenizer as tokenizer_module
from mindrlhf.data.tokenizer import Tokenizer, train_tokenizer
from mindrlhf.errors import UserError
from mindrlhf.models.families import VOCABULARY


@pytest.fixture(scope="module")
def golden(shared):
    return json.loads((shared / "golden" / "qwen2_5_tokenizer.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def qwen_config(shared):
    return json.loads((shared / "data" / "qwen2_5_tokenizer" / "tokenizer_config.json").read_text(encoding="utf-8"))


def write_pair(folder, vocab, merges=()):
    """A vocab.json and a merges.txt."""
    folder.mkdir(exist_ok=True)
    (folder / "vocab.json").write_text(json.dumps(vocab), encoding="utf-8")
    (folder / "merges.txt").write_text("#version: 0.2\n" + "".join(f"{m}\n" for m in merges), encoding="utf-8")
    return folder / "vocab.json", folder / "merges.txt"


def test_reference_ids(qwen, golden):
    assert len(golden) > 50
    for entry in golden:
        assert qwen.encode(entry["text"]) == entry["ids"], entry["text"]
    assert qwen.encode_batch([entry["text"] for entry in golden]) == [entry["ids"] for entry in golden]


def test_reference_ids_decode_to_the_normalised_text(qwen, golden):
    for entry in golden:
        assert qwen.decode(entry["ids"]) == unicodedata.normalize("NFC", entry["text"])


@settings(max_examples=300, deadline=None, derandomize=True)
@given(text=st.text() | st.lists(st.sampled_from([*VOCABULARY.control, "'S", "\r\n", " ", "7", "é"])).map("".join))
def test_round_trip(qwen, text):
    text = unicodedata.normalize("NFC", text)
    ids = qwen.encode(text)
    assert qwen.decode(ids) == text
    assert qwen.decode(np.array(ids, np.int32)) == text
    assert all(0 <= token_id < qwen.size for token_id in ids)


def test_special_tokens(qwen):
    assert qwen.size == 151665
    assert qwen.token_to_id("<|im_start|>") == 151644
    assert qwen.id_to_token(151645) == "<|im_end|>"
    assert qwen.eos_token_id == qwen.pad_token_id == 151643
    assert qwen.token_to_id("no such token") is None
    assert qwen.id_to_token(10**6) is None
    ids = qwen.encode("<|im_start|>a<tool_call><|im_end|>")
    assert qwen.decode(ids, skip_special_tokens=True) == "a<tool_call>"
    assert qwen.decode([*qwen.encode("b"), 151900]) == "b"  # a padded model vocabulary can give ids without a token


def test_default_special_tokens_are_those_of_the_published_configuration(qwen_config, shared, tmp_path):
    for name in ("vocab.json", "merges.txt"):
        shutil.copy(shared / "data" / "qwen2_5_tokenizer" / name, tmp_path / name)
    tokenizer = Tokenizer.from_files(tmp_path / "vocab.json", tmp_path / "merges.txt")
    published = {
        entry["content"]: (int(i), entry["special"]) for i, entry in qwen_config["added_tokens_decoder"].items()
    }
    assert [*VOCABULARY.control, *VOCABULARY.markup] == list(published)
    for token, (token_id, special) in published.items():
        assert tokenizer.token_to_id(token) == token_id
        assert tokenizer.decode([token_id], skip_special_tokens=True) == ("" if special else token)
    assert tokenizer.chat_template is None


def test_default_special_tokens_follow_another_vocabulary(tmp_path):
    tokenizer = Tokenizer.from_files(*write_pair(tmp_path, {"a": 0, "<|im_end|>": 1, "b": 2, "ab": 3}, ["a b"]))
    assert tokenizer.encode("ab<|im_end|><|endoftext|><|im_start|>") == [3, 1, 4, 5]
    assert tokenizer.size == 4 + 22 - 1


def test_saved_files_load_again(qwen, golden, qwen_config, tmp_path):
    qwen.save(tmp_path)
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        *("merges.txt", "tokenizer.json", "tokenizer_config.json", "vocab.json")
    ]
    saved = json.loads((tmp_path / "tokenizer_config.json").read_text(encoding="utf-8"))
    assert saved["added_tokens_decoder"] == qwen_config["added_tokens_decoder"]
    assert saved["chat_template"] == qwen_config["chat_template"]
    for loaded in (Tokenizer.from_path(tmp_path), Tokenizer.from_path(tmp_path / "merges.txt")):
        assert [loaded.encode(entry["text"]) for entry in golden] == [entry["ids"] for entry in golden]
        assert (loaded.eos_token_id, loaded.pad_token_id, loaded.size) == (151643, 151643, 151665)
        assert loaded.chat_template == qwen.chat_template


def test_saved_files_load_in_transformers(small, tmp_path):
    transformers = pytest.importorskip("transformers")
    small.save(tmp_path)
    text = "<|im_start|>Tom: ﬁ é 3+4=77 it's #### <|im_end|>\n"
    for loaded in (
        transformers.AutoTokenizer.from_pretrained(tmp_path),
        transformers.Qwen2Tokenizer(str(tmp_path / "vocab.json"), str(tmp_path / "merges.txt")),
    ):
        if isinstance(loaded, transformers.Qwen2Tokenizer):  # the slow class, which knows the files but not the config
            loaded.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
        assert loaded(text)["input_ids"] == small.encode(text)
    loaded = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert (loaded.eos_token_id, loaded.pad_token_id) == (small.eos_token_id, small.pad_token_id)


def test_pad_is_the_end_token_when_none_is_named(small, tmp_path):
    small.save(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    del config["pad_token"]
    config["eos_token"] = {"content": "<|im_start|>", "special": True}  # HF's other spelling
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    loaded = Tokenizer.from_path(tmp_path)
    assert loaded.pad_token_id == loaded.eos_token_id == small.token_to_id("<|im_start|>")


def test_chat_template_file(small, tmp_path):
    small.save(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    assert Tokenizer.from_path(tmp_path).chat_template == "{{ messages }}"


def test_missing_files(tmp_path):
    with pytest.raises(UserError, match=r"vocab.json: no such tokenizer file"):
        Tokenizer.from_files(tmp_path / "vocab.json", tmp_path / "merges.txt")
    with pytest.raises(UserError, match="holds no tokenizer"):
        Tokenizer.from_path(tmp_path)


@pytest.mark.parametrize("vocab", ["[1, 2", '["a"]', "\x00"])
def test_vocabulary_that_is_not_one(tmp_path, vocab):
    paths = write_pair(tmp_path, {"a": 0})
    paths[0].write_text(vocab)
    with pytest.raises(UserError, match=r"vocab.json and .*merges.txt are not a BPE vocabulary"):
        Tokenizer.from_files(*paths)


def test_merges_of_another_vocabulary(tmp_path):
    with pytest.raises(UserError, match=r"not a BPE vocabulary and its merges .*xy"):
        Tokenizer.from_files(*write_pair(tmp_path, {"a": 0, "b": 1, "x": 2, "y": 3}, ["x y"]))


def test_vocabulary_with_gaps(tmp_path):
    with pytest.raises(UserError, match="ids are not 0 to 1 without gaps"):
        Tokenizer.from_files(*write_pair(tmp_path, {"a": 0, "b": 7}))


def test_configuration_of_another_vocabulary(tmp_path, qwen_config):
    paths = write_pair(tmp_path, {"a": 0, "b": 1})
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(qwen_config))
    with pytest.raises(UserError, match=r"<\|endoftext\|> the id 151643, but with this vocabulary it is 2"):
        Tokenizer.from_files(*paths)


@pytest.mark.parametrize("content", ["{", "[]", '{"added_tokens_decoder": {"x": 1}}', '{"added_tokens_decoder": [1]}'])
def test_damaged_configuration(tmp_path, content):
    paths = write_pair(tmp_path, {"a": 0, "b": 1})
    (tmp_path / "tokenizer_config.json").write_text(content)
    with pytest.raises(UserError, match=r"tokenizer_config.json"):
        Tokenizer.from_files(*paths)


def test_damaged_tokenizer_json(tmp_path):
    path = tmp_path / "tokenizer.json"
    path.write_text('{"model": ')
    with pytest.raises(UserError, match=r"tokenizer.json: not a tokenizer.json"):
        Tokenizer.from_path(path)


def test_tokenizer_without_an_end_token(tmp_path):
    paths = write_pair(tmp_path, {"a": 0, "b": 1})
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "</s>", "pad_token": "<pad>"}')
    tokenizer = Tokenizer.from_files(*paths)
    with pytest.raises(UserError, match="end token </s> is not in it"):
        tokenizer.eos_token_id  # noqa: B018
    with pytest.raises(UserError, match="pad token <pad>"):
        tokenizer.pad_token_id  # noqa: B018


@pytest.mark.parametrize("kept", few_of([0.5], [0, 0.99]))
def test_merges_that_are_cut_are_refused(shared, tmp_path, kept):
    """With a whole vocabulary every text would still be encoded, into other tokens than the model knows."""
    folder = shared / "data" / "qwen2_5_tokenizer"
    lines = (folder / "merges.txt").read_text(encoding="utf-8").splitlines(keepends=True)
    (tmp_path / "vocab.json").write_bytes((folder / "vocab.json").read_bytes())
    (tmp_path / "merges.txt").write_text("".join(lines[: int(kept * len(lines))]), encoding="utf-8")
    with pytest.raises(
        UserError, match=r"merges\.txt: lacks the merges of [\d,]+ of the 151,387 tokens in .*vocab\.json"
    ):
        Tokenizer.from_path(tmp_path)


@pytest.mark.parametrize("key", ["eos_token", "pad_token", "bos_token", "added_tokens_decoder", "chat_template"])
def test_crafted_configurations_are_sentences(small, tmp_path, key):
    small.save(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    named = {"content": 10**30}, {str(10**30): {"content": "x"}}, {"300": -0.5}, {"300": {"content": 5}}
    for value in (10**30, -0.5, [], {}, "<|nowhere|>", *named):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | {key: value}))
        message = ""
        try:
            tokenizer = Tokenizer.from_path(tmp_path)
            assert 0 <= tokenizer.eos_token_id < tokenizer.size
            assert 0 <= tokenizer.pad_token_id < tokenizer.size
        except UserError as error:
            message = str(error)
        assert "\n" not in message
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | {"eos_token": 10**30}))
    with pytest.raises(UserError, match=r"tokenizer_config\.json: eos_token is 10+, and must be text"):
        Tokenizer.from_path(tmp_path)


def said(function, *arguments) -> str:
    """What a UserError says; nothing where there is none."""
    try:
        function(*arguments)
    except UserError as error:
        return str(error)
    return ""


def hostile_tokenizer(folder, pattern):
    """A tokenizer that splits text by a pattern, in a folder."""
    core = train_tokenizer(["some text"], 300)._core
    core.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    core.save(str(folder / "tokenizer.json"))
    return Tokenizer.from_path(folder)


@pytest.mark.parametrize(("pattern", "text"), [("(a+)+$", "a" * 40 + "b"), ("(x+x+)+y", "x" * 40)])
def test_a_pattern_that_panics(tmp_path, pattern, text):
    """The regular expressions of tokenizers give up with a panic, which is no Exception."""
    tokenizer = hostile_tokenizer(tmp_path, pattern)
    fault = f"{tmp_path}/tokenizer.json: the tokenizer fails on a text"
    assert said(tokenizer.encode, text).startswith(fault)
    assert said(tokenizer.encode_batch, [text]).startswith(fault)


def test_a_pattern_that_panics_when_it_is_opened(tmp_path):
    fault = said(hostile_tokenizer, tmp_path, "(a+)+!|(a+)+0")
    assert fault.startswith(f"{tmp_path}/tokenizer.json: the tokenizer fails on 1,000 letters")


class SquareTime:
    """A tokenizer's core whose time grows with the square of a text of one letter, by a clock of its own."""

    def __init__(self, letter, seconds):
        self.letter, self.seconds, self.now, self.longest = letter, seconds, 0.0, 0

    def encode(self, text, add_special_tokens):
        self.longest = max(self.longest, len(text))
        self.now += self.seconds * (text == self.letter * len(text)) * (len(text) / 16_000) ** 2


def paced(core, folder, monkeypatch):
    monkeypatch.setattr("mindrlhf.data.tokenizer.time.thread_time", lambda: core.now)
    tokenizer_module._check_pace(core, folder / "tokenizer.json")


@pytest.mark.parametrize(("letter", "kind"), [("a", "letters"), (" ", "spaces"), ("1", "digits"), ("!", "signs")])
def test_a_pattern_whose_time_grows_with_the_square(tmp_path, letter, kind, monkeypatch):
    """Such a file would hold a run up for hours over one long text of its data; it is not tried on longer ones."""
    core = SquareTime(letter, 20.0)
    assert f"tokenizer.json: 4,000 {kind} take 1.2 s of the processor" in said(paced, core, tmp_path, monkeypatch)
    assert core.longest == 4_000
    slow, quick = SquareTime(letter, 0.9), SquareTime(letter, 0.01)
    for core in (slow, quick):
        paced(core, tmp_path, monkeypatch)
    assert slow.longest == 16_000 > quick.longest, "a quick one costs no long text"


def test_the_pace_is_checked_when_a_file_is_opened(tmp_path, monkeypatch):
    monkeypatch.setattr("mindrlhf.data.tokenizer._MOST_SECONDS", -1.0)
    assert "1,000 letters take" in said(hostile_tokenizer, tmp_path, "[a-z]+[A-Z]|0")


@pytest.mark.parametrize("kind", ["folder", "link to nowhere"])
@pytest.mark.parametrize("name", ["tokenizer_config.json", "chat_template.jinja", "tokenizer.json"])
def test_a_file_that_is_none(tmp_path, name, kind):
    """It does not count as absent: another end token and no chat template would follow, without a word."""
    train_tokenizer(["some text"], 300).save(tmp_path)
    (tmp_path / name).unlink(missing_ok=True)
    if kind == "folder":
        (tmp_path / name).mkdir()
    else:
        (tmp_path / name).symlink_to(tmp_path / "none")
    with pytest.raises(UserError, match=name.replace(".", r"\.")):
        Tokenizer.from_path(tmp_path)
