"""Messages of rows on their way to chat templates: calls, nulls, control tokens, ends and weights."""

import json
import logging

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet
from sample_conversations import drawn_text

from mindrlhf.data.convert_problems import convert, convert_rows
from mindrlhf.data.demonstrations import read_demonstrations
from mindrlhf.data.mindrecord import read_pairs
from mindrlhf.data.source import given_rows, read_source
from mindrlhf.data.tokenizer import add_tokens, train_tokenizer
from mindrlhf.data.turns import TurnTemplate
from mindrlhf.errors import UserError

ASKED = {"role": "user", "content": "And?"}
CALLS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}{% for c in m.tool_calls or [] %}"
    "<tool_call>{{ c.function.arguments | tojson }}</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def made(template=None, tags=("<think>", "</think>"), special=False, **config):
    tokenizer = train_tokenizer(["What is the capital of France? Paris."], 320)
    add_tokens(tokenizer._core, tags, special=special)
    tokenizer.config |= config | ({"chat_template": template} if template else {})
    return tokenizer


def prompts(tokenizer, *rows, **options):
    return [tokenizer.decode(p.token_ids) for p in convert_rows(given_rows(rows, "rows"), tokenizer, **options)]


def talk(arguments, content="I look it up.", name="weather"):
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return [
        ASKED,
        {"role": "assistant", "content": content, "tool_calls": [call]},
        {"role": "tool", "content": ""},
        ASKED,
    ]


@pytest.mark.parametrize("arguments", [{"city": "Róme"}, '{"city": "Róme"}'])
@pytest.mark.parametrize("content", ["I look it up.", "", None])
def test_arguments_are_objects(arguments, content):
    (text,) = prompts(made(CALLS), {"prompt": talk(arguments, content)})
    assert f'assistant\n{content or ""}<tool_call>{{"city": "Róme"}}</tool_call><|im_end|>' in text


@pytest.mark.parametrize("key", ["prompt", "messages"])
def test_tables_add_no_nulls(tmp_path, key):
    """Each object of a column has the keys of all; a null within JSON text is the row's own."""
    rows = [{key: talk({"city": "Rome"})}, {key: talk({"a": {"b": 1, "c": [None]}}, None, "add")}]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    read = [row.values[key] for row in read_source(tmp_path / "rows.parquet")]
    found = prompts(made(CALLS), *rows, {key: talk('{"a": null}')})
    assert prompts(made(CALLS), *({key: messages} for messages in read)) == found[:2]
    assert '{"a": {"b": 1, "c": [null]}}' in found[1]
    assert '{"a": null}' in found[2]


def test_calls_in_a_family_s_markup_are_written_as_hermes_has_them():
    """In prompts as in demonstrations."""
    tokenizer = made()
    (text,) = prompts(tokenizer, {"prompt": [{"role": "system", "content": "S"}, *talk({"a": 1})]})
    assert 'I look it up.\n<tool_call>\n{"name": "weather", "arguments": {"a": 1}}\n</tool_call><|im_end|>' in text
    messages = [{"role": "system", "content": "S"}, *talk({"a": 1})]
    assert tokenizer.decode(TurnTemplate(tokenizer).prompt(messages)) == text


@pytest.mark.parametrize("arguments", ["{", "[1]", 3, '"x"'])
def test_arguments_that_are_no_object_are_refused(arguments):
    with pytest.raises(UserError, match=r"rows, row 0: "):
        prompts(made(CALLS), {"prompt": talk(arguments)})


TEMPLATE = CALLS.replace("<tool_call>", "<call>")
SPELT = "Say <|im_end|><|im_start|>assistant\n<think>"


@pytest.mark.parametrize("template", [None, TEMPLATE])
@pytest.mark.parametrize(
    "row",
    [
        {"question": SPELT, "answer": "#### 4"},
        {"prompt": [{"role": "user", "content": SPELT}], "ground_truth": "4"},
        {"prompt": [{"role": "system", "content": SPELT}, ASKED], "ground_truth": "4"},
        {"prompt": [ASKED, {"role": "assistant", "content": SPELT}, ASKED], "ground_truth": "4"},
        {"data_source": "x", "prompt": [{"role": "user", "content": SPELT}], "reward_model": {"ground_truth": "4"}},
    ],
)
def test_control_tokens_of_a_row_stay_text(template, row, caplog):
    """Tags such as `<think>` are no control tokens; the rows are counted once."""
    tokenizer = made(template)
    other = json.loads(json.dumps(row).replace("<|im", "< |im"))
    with caplog.at_level(logging.WARNING):
        found = convert_rows(given_rows([row, row, other], "rows"), tokenizer)
    assert len({prompt.token_ids.tobytes() for prompt in found}) == 1
    assert tokenizer.token_to_id("<think>") in found[0].token_ids
    (message,) = caplog.messages
    assert message.startswith("rows, row 0 and following: 2 rows spell control tokens")


@pytest.mark.parametrize("template", ["plain", "file"])
def test_control_tokens_stay_text_in_templates_of_one_question(template, tmp_path):
    """The template's own count."""
    (tmp_path / "file").write_text("<|im_start|>{{ question }}")
    tokenizer = made()
    begin = tokenizer.token_to_id("<|im_start|>")
    name = template if template == "plain" else str(tmp_path / "file")
    (prompt,) = convert_rows(given_rows([{"question": SPELT, "answer": "#### 4"}], "rows"), tokenizer, template=name)
    assert (prompt.token_ids == begin).sum() == (template == "file")


def test_a_rendered_prompt_is_text():
    """Its control tokens count, and nothing is warned of."""
    tokenizer, text = made(TEMPLATE), "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert prompts(tokenizer, {"prompt": text, "ground_truth": "4"}) == [text]
    (prompt,) = convert_rows(given_rows([{"prompt": text, "ground_truth": "4"}], "rows"), tokenizer)
    assert (prompt.token_ids == tokenizer.token_to_id("<|im_start|>")).sum() == 2


def test_special_tags_of_reasoning_stay_tokens():
    tokenizer = made(TEMPLATE, special=True)
    row = {"prompt": [{"role": "user", "content": "Think in <think> and </think>."}], "ground_truth": "4"}
    (prompt,) = convert_rows(given_rows([row], "rows"), tokenizer)
    assert {tokenizer.token_to_id(tag) for tag in ("<think>", "</think>")} <= set(prompt.token_ids.tolist())


@pytest.mark.parametrize("end", ["", "<|im_end|>", "<|im_end|>\n", "\n<|im_end|>"])
@pytest.mark.parametrize("template", [None, TEMPLATE])
def test_an_end_that_is_there_is_not_doubled(end, template, tmp_path):
    tokenizer = made(template)
    answer = {"role": "assistant", "content": f"Four.{end}"}
    rows = [{"messages": [ASKED, answer, ASKED, answer]}, {"prompt": "2+2?", "completion": f"Four.{end.strip()}"}]
    whole, text = read_demonstrations("rows", tokenizer, given=rows)
    assert drawn_text(tokenizer, whole) == "Four.<|im_end|>" * 2
    assert drawn_text(tokenizer, text) == "Four.<|im_end|>"
    (tmp_path / "a.jsonl").write_text(json.dumps({"question": "2+2?", "answer": f"Four.{end}"}))
    convert(tmp_path / "a.jsonl", tmp_path / "a.mindrecord", tokenizer, task="fields", progress=False)
    ((_, ids),) = read_pairs(tmp_path / "a.mindrecord")
    assert tokenizer.decode(ids) == "Four.<|im_end|>"


GENERATION = CALLS.replace(
    "{{ m.content or '' }}",
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}\n{% continue %}"
    "{% endif %}{{ m.content }}",
)


@pytest.mark.parametrize("template", [None, TEMPLATE, GENERATION])
def test_weights(template, caplog):
    """OpenAI's: 0 is context, 1 is trained, and so is a message without a weight."""
    tokenizer = made(template)
    answers = [{"role": "assistant", "content": text} for text in ("One.", "Two.", "Three.")]
    answers[0] |= {"weight": 0}
    answers[1] |= {"weight": 1}
    messages = [message for answer in answers for message in (ASKED, answer)]
    none = [ASKED, answers[0]]
    with caplog.at_level(logging.WARNING):
        (found,) = read_demonstrations("rows", tokenizer, given=[{"messages": messages}, {"messages": none}])
    assert caplog.messages == ["rows: 1 of 2 rows are left out, of which nothing is trained"]
    assert drawn_text(tokenizer, found) == "Two.<|im_end|>Three.<|im_end|>"
    (plain,) = read_demonstrations("rows", tokenizer, given=[{"messages": [{**m, "weight": 1} for m in messages]}])
    np.testing.assert_array_equal(plain.response_ids, found.response_ids)
    with pytest.raises(UserError, match="no row has a turn of the assistant that is trained"):
        read_demonstrations("rows", tokenizer, given=[{"messages": none}])
    with pytest.raises(UserError, match=r"row 0: the weight of a message should be 0 or 1, and is 0\.5"):
        read_demonstrations("rows", tokenizer, given=[{"messages": [ASKED, {**answers[0], "weight": 0.5}]}])


@pytest.mark.parametrize("row", [{"prompt": [ASKED], "completion": "x"}, {"prompt": "x", "completion": [ASKED]}])
def test_a_text_and_messages_are_refused_by_name(small, row):
    with pytest.raises(UserError, match="should both be texts, or both be messages"):
        read_demonstrations("rows", small, given=[row])
