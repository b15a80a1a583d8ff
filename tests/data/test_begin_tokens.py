"""Begin tokens: where the tokenizer adds one to texts, a text has it once; a chat template writes its own."""

import json

import pytest
from tokenizers import processors

from mindrlhf.data.convert_problems import convert_rows
from mindrlhf.data.demonstrations import read_demonstrations
from mindrlhf.data.requests import given_prompts
from mindrlhf.data.source import given_rows
from mindrlhf.data.tokenizer import Tokenizer, add_tokens, train_tokenizer

BEGIN, END = "<|begin_of_text|>", "<|eot_id|>"
MESSAGES = [{"role": "user", "content": "Hi"}]
ANSWERED = [*MESSAGES, {"role": "assistant", "content": "Hi."}]
TEXT, QUESTION = {"prompt": "The capital is", "ground_truth": "x"}, {"question": "2+2?", "answer": "#### 4"}
TEMPLATE = (
    "{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)


@pytest.fixture(params=["post-processor", "configuration", "forbidden", "none"])
def tokenizer(request):
    """A tokenizer as Llama 3's, and whether it adds its begin token."""
    made = train_tokenizer(["What is the capital of France? Paris."], 320)
    add_tokens(made._core, [BEGIN, "<|start_header_id|>", "<|end_header_id|>", END])
    made.config = {"bos_token": BEGIN, "eos_token": END, "chat_template": "{{ bos_token }}" + TEMPLATE}
    if request.param in ("post-processor", "forbidden"):
        pair = (BEGIN, made.token_to_id(BEGIN))
        made._core.post_processor = processors.TemplateProcessing(
            single=f"{BEGIN} $A {END}", special_tokens=[pair, (END, made.token_to_id(END))]
        )
    if request.param in ("configuration", "forbidden"):
        made.config["add_bos_token"] = request.param == "configuration"
    return made, request.param in ("post-processor", "configuration")


def count(tokenizer, ids) -> int:
    begin = tokenizer.token_to_id(BEGIN)
    assert begin not in list(ids)[1:]
    return int(ids[0] == begin)


def test_each_prompt_has_it_once(tokenizer):
    made, adds = tokenizer

    def prompt(row, **options):
        (found,) = convert_rows(given_rows([row], "rows"), made, **options)
        return count(made, found.token_ids)

    def demonstrated(row):
        (found,) = read_demonstrations("rows", made, given=[row])
        return count(made, found.prompt_ids)

    assert prompt({"prompt": MESSAGES}) == prompt(QUESTION) == demonstrated({"messages": ANSWERED}) == 1
    assert prompt(TEXT) == prompt(QUESTION, template="plain") == adds
    assert demonstrated({"prompt": "The capital is", "completion": " Paris."}) == adds
    rendered = f"{BEGIN}<|start_header_id|>user"
    assert (
        prompt({"prompt": rendered, "ground_truth": "x"}) == demonstrated({"prompt": rendered, "completion": "x"}) == 1
    )
    text, talk = given_prompts(["Hi", MESSAGES], made)
    assert (count(made, text.token_ids), count(made, talk.token_ids)) == (adds, 1)


def test_a_template_without_it_adds_none(tokenizer):
    """As transformers, which adds no special tokens to what a template wrote."""
    made, _ = tokenizer
    made.config["chat_template"] = TEMPLATE
    (found,) = convert_rows(given_rows([QUESTION], "rows"), made)
    assert count(made, found.token_ids) == 0


@pytest.mark.parametrize(("config", "adds"), [(None, 1), ({}, 1), ({"add_bos_token": False}, 0)])
def test_sentencepiece(tmp_path, config, adds):
    import sentencepiece

    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["How many apples does Tom have left?"] * 20),
        model_prefix=str(tmp_path / "tokenizer"),
        vocab_size=280,
        model_type="bpe",
        byte_fallback=True,
        minloglevel=2,
    )
    if config is not None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>", "bos_token": "<s>"} | config))
    made = Tokenizer.from_path(tmp_path)
    ids = made.encode_prompt("How many")
    assert ids == [made.token_to_id("<s>")] * adds + made.encode("How many")
    assert made.encode_prompt("<s>How many").count(made.token_to_id("<s>")) == 1
