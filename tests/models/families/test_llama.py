"""Llama 3: its tokenizer, chat markup and end tokens; models of its architecture with markup of their own."""

import json

import numpy as np
import pytest
from small_model import SmallModel
from tokenizers import Regex, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Core
from whole_sequences import batch_inputs

from mindrlhf.checkpoint.tokenizer import stop_ids
from mindrlhf.configs.model import ModelConfig
from mindrlhf.data.tasks.task import TaskRow
from mindrlhf.data.templates import prompt_ids
from mindrlhf.data.tokenizer import Tokenizer

# The split of Llama 3's published tokenizer.json: up to three digits are one token.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
LLAMA = (
    *("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>", "<|eot_id|>"),
)
DEEPSEEK = ("<|bos|>", "<|eos|>", "<|User|>", "<|Assistant|>")
DEEPSEEK_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}{% else %}<|User|>{{ m.content }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|Assistant|><think>\n{% endif %}"
)
LLAMA_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m['role'] }}<|end_header_id|>\n\n"
    "{{ m['content'] | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)


def written(folder, special, config):
    """A folder with a byte-level tokenizer.json of Llama 3's kind; digits `12` and `123` are tokens."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate([*letters, "12", "123"])}
    core = Core(models.BPE(vocab, [("1", "2"), ("12", "3")], ignore_merges=True))
    split = pre_tokenizers.Split(Regex(SPLIT), behavior="isolated")
    core.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(list(special))
    core.save(str(folder / "tokenizer.json"))
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return Tokenizer.from_path(folder)


def llama(**changes) -> ModelConfig:
    sizes = {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    return ModelConfig.from_hf({"model_type": "llama", "num_attention_heads": 4, **sizes, **changes}, "config.json")


def prompts(tokenizer, template=None, system=None):
    rows = [TaskRow("1 + 2?", "", "3")]
    return list(map(tokenizer.decode, prompt_ids(rows, ["line 1"], "Think.", template, system, tokenizer)))


@pytest.fixture
def tokenizer(tmp_path):
    return written(tmp_path, LLAMA, {"eos_token": "<|eot_id|>", "bos_token": "<|begin_of_text|>"})


def test_its_tokenizer_json_keeps_its_split_when_it_is_saved(tokenizer, tmp_path):
    text = "a 1231234\n"
    ids = tokenizer.encode(text)
    assert [tokenizer.id_to_token(i) for i in ids][2:5] == ["123", "123", "4"]
    assert tokenizer.decode(ids) == text
    tokenizer.save(tmp_path / "saved")
    names = {path.name for path in (tmp_path / "saved").iterdir()}
    assert names == {"tokenizer.json", "tokenizer_config.json"}  # a bare vocabulary would be cut as Qwen2's
    assert Tokenizer.from_path(tmp_path / "saved").encode(text) == ids


@pytest.mark.parametrize("template", [None, LLAMA_TEMPLATE])
def test_prompts_are_in_its_markup(tokenizer, template):
    if template is not None:
        tokenizer.config["chat_template"] = template
    user = "<|start_header_id|>user<|end_header_id|>\n\n1 + 2?\nThink.<|eot_id|>"
    answer = "<|start_header_id|>assistant<|end_header_id|>\n\n"
    assert prompts(tokenizer) == [f"<|begin_of_text|>{user}{answer}"]
    system = "<|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
    assert prompts(tokenizer, system="Be brief.") == [f"<|begin_of_text|>{system}{user}{answer}"]
    assert prompts(tokenizer, "chat", "Be brief.") == [f"<|begin_of_text|>{system}{user}{answer}"]
    assert prompts(tokenizer, "think")[0].startswith("<|begin_of_text|><|start_header_id|>system<|end_header_id|>")


def test_its_turns_end_a_response(tokenizer):
    ends = {tokenizer.token_to_id(token) for token in ("<|eot_id|>", "<|end_of_text|>", "<|eom_id|>")}
    assert set(stop_ids(tokenizer, llama(eos_token_id=7))) == {7, *ends}


def test_a_tokenizer_that_names_no_end(tmp_path):
    tokenizer = written(tmp_path, LLAMA, None)
    assert tokenizer.eos_token_id == tokenizer.token_to_id("<|end_of_text|>")


def test_a_distilled_model_keeps_its_own_markup(tmp_path):
    """DeepSeek-R1-Distill-Llama: Llama's vocabulary and architecture, another template and end of text."""
    config = {"eos_token": "<|eos|>", "bos_token": "<|bos|>", "chat_template": DEEPSEEK_TEMPLATE}
    tokenizer = written(tmp_path, (*LLAMA, *DEEPSEEK), config)
    assert prompts(tokenizer) == ["<|bos|><|User|>1 + 2?\nThink.<|Assistant|><think>\n"]
    assert tokenizer.eos_token_id in stop_ids(tokenizer, llama())


@pytest.mark.parametrize("tied", [False, True])
def test_heads_and_sizes(tied):
    model = llama(tie_word_embeddings=tied, num_key_value_heads=2)
    assert (model.head_dim, model.num_kv_heads, model.max_position_embeddings) == (8, 2, 2048)
    names = {spec.name for spec in SmallModel(model, {}).specs}
    assert ("lm_head.weight" in names) is not tied
    assert not any("bias" in name or "q_norm" in name for name in names)
    assert llama(head_dim=16).head_dim == 16


def test_its_tied_model_without_scaling_gives_the_oracle_s_logits():
    """Llama 2's shape, and 3.2's small ones: one matrix for embedding and head."""
    from mindspore import Tensor, nn

    model = SmallModel.random(6, family="llama", attention_bias=False, tie_word_embeddings=True)
    decoder, _ = model.build()

    class Logits(nn.Cell):
        def __init__(self):
            super().__init__(auto_prefix=False)
            self.decoder = decoder

        def construct(self, prefix_ids, prefix_lengths, input_ids, lengths):
            return self.decoder.logits(
                self.decoder.completions(batch_inputs(prefix_ids, prefix_lengths, input_ids, lengths))
            )

    rng = np.random.default_rng(7)
    prefix, rest = rng.integers(0, 64, (1, 4)), rng.integers(0, 64, (1, 5))
    inputs = (prefix, np.array([4]), rest, np.array([5]))
    found = Logits()(*(Tensor(part.astype(np.int32)) for part in inputs)).asnumpy().reshape(5, -1)
    expected = model.logits(np.concatenate([prefix[0], rest[0]]))[4:]
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-5)
