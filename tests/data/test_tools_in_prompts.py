"""Tools listed in prompts by the tokenizer's own chat template."""

import json

import pytest

from mindrlhf.data.tasks.task import TaskRow
from mindrlhf.data.templates import prompt_texts
from mindrlhf.environments.pool import tool_schemas
from mindrlhf.errors import UserError

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "5 * 6?"}]
ROWS = [TaskRow("1 + 2?", "", "3"), TaskRow("5 * 6?", "", "30", messages=MESSAGES)]


def texts(tokenizer, template=None):
    places = [f"row {number}" for number in range(len(ROWS))]
    return prompt_texts(ROWS, places, "Think.", template, None, tokenizer, tool_schemas(None, ["calculator"]))


def test_questions_and_conversations_list_them(qwen):
    if not qwen.chat_template:
        pytest.skip("Qwen2.5's tokenizer_config.json is not here")
    (schema,) = tool_schemas(None, ["calculator"])
    for text, question in zip(texts(qwen), ("1 + 2?\nThink.", "5 * 6?"), strict=True):
        assert json.dumps(schema["function"]["parameters"]["required"]) in text
        assert text.endswith(f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n")
    plain, _ = prompt_texts(ROWS, ["row 0", "row 1"], "", None, None, qwen)
    assert "calculator" not in plain


def test_another_template_is_refused(qwen):
    with pytest.raises(UserError, match="lists tools"):
        texts(qwen, "plain")


def test_schemas_of_an_environment_and_tools():
    assert tool_schemas(None, ()) == []
    schemas = tool_schemas(None, ["calculator", "sqlite"])
    assert [schema["function"]["name"] for schema in schemas] == ["calculator", "sqlite"]
    with pytest.raises(UserError, match="nearest: 'calculator'"):
        tool_schemas(None, ["calculater"])
