"""Tools listed in prompts by the tokenizer's own chat template."""

import json

import pytest

from mindrlhf.data.tasks.task import TaskRow
from mindrlhf.data.templates import prompt_ids
from mindrlhf.environments.pool import tool_schemas
from mindrlhf.errors import UserError

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "5 * 6?"}]
ROWS = [TaskRow("1 + 2?", "", "3"), TaskRow("5 * 6?", "", "30", messages=MESSAGES)]


def texts(tokenizer, template=None):
    places = [f"row {number}" for number in range(len(ROWS))]
    ids = prompt_ids(ROWS, places, "Think.", template, None, tokenizer, tool_schemas(None, ["calculator"]))
    return [tokenizer.decode(each) for each in ids]


def test_questions_and_conversations_list_them(qwen):
    if not qwen.chat_template:
        pytest.skip("Qwen2.5's tokenizer_config.json is not here")
    (schema,) = tool_schemas(None, ["calculator"])
    for text, question in zip(texts(qwen), ("1 + 2?\nThink.", "5 * 6?"), strict=True):
        assert json.dumps(schema["function"]["parameters"]["required"]) in text
        assert text.endswith(f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n")
    plain, _ = prompt_ids(ROWS, ["row 0", "row 1"], "", None, None, qwen)
    assert "calculator" not in qwen.decode(plain)


def test_what_cannot_list_them_is_refused(qwen, small):
    """Another template, and a tokenizer without a chat template: each says what is missing."""
    with pytest.raises(UserError, match=r"--template plain: lists no tools, .* leave it out"):
        texts(qwen, "plain")
    with pytest.raises(UserError, match="the tokenizer has no chat template, which would list the tools"):
        texts(small)


def test_schemas_of_an_environment_and_tools():
    assert tool_schemas(None, ()) == []
    schemas = tool_schemas(None, ["calculator", "sqlite"])
    assert [schema["function"]["name"] for schema in schemas] == ["calculator", "sqlite"]
    with pytest.raises(UserError, match="nearest: 'calculator'"):
        tool_schemas(None, ["calculater"])
