"""Chat templates and tokens of a tokenizer's folder: read wherever transformers reads them."""

import json
import logging

import pytest

from mindrlhf.data.convert_problems import convert_rows
from mindrlhf.data.demonstrations import read_demonstrations
from mindrlhf.data.source import given_rows
from mindrlhf.data.tokenizer import Tokenizer, add_tokens, train_tokenizer
from mindrlhf.data.turns import TurnTemplate
from mindrlhf.errors import UserError

NAMED = [{"name": name, "template": f"{name}{{{{ messages[0].content }}}}"} for name in ("default", "tool_use", "rag")]
SCHEMA = {"type": "function", "function": {"name": "f", "parameters": {}}}


@pytest.fixture
def folder(tmp_path):
    """Writes a tokenizer's folder with these settings, tokens of the special map, and files."""

    def write(config=None, tokens=None, **files):
        tokenizer = train_tokenizer(["What is the capital of France? Paris."], 320)
        add_tokens(tokenizer._core, ["<|user_end|>", "<|begin|>"])
        tokenizer._core.save(str(tmp_path / "tokenizer.json"))
        for name, content in (("tokenizer_config.json", config), ("special_tokens_map.json", tokens)):
            if content is not None:
                (tmp_path / name).write_text(json.dumps(content))
        for name, text in files.items():
            path = tmp_path / f"{name.replace('__', '/')}.jinja"
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
        return Tokenizer.from_path(tmp_path)

    return write


def asked(tokenizer, **options):
    row = {"prompt": [{"role": "user", "content": "Hi"}], "ground_truth": "4"}
    (prompt,) = convert_rows(given_rows([row], "rows"), tokenizer, **options)
    return tokenizer.decode(prompt.token_ids)


@pytest.mark.parametrize(
    "config", [None, {}, {"eos_token": None}, {"eos_token": "<|im_end|>", "pad_token": "<|im_end|>"}]
)
def test_tokens_of_the_special_map(folder, config):
    """They fill what is missing, and decide where no added tokens are listed: so transformers reads older folders."""
    tokens = {"eos_token": "<|user_end|>", "pad_token": {"content": "<|endoftext|>"}, "bos_token": "<|begin|>"}
    tokenizer = folder(
        config,
        tokens | {"additional_special_tokens": ["<|x|>"]},
        chat_template=(
            "{{ bos_token }}{{ pad_token }}{{ eos_token }}{{ additional_special_tokens[0] }}{{ unk_token is defined }}"
        ),
    )
    assert tokenizer.id_to_token(tokenizer.eos_token_id) == "<|user_end|>"
    assert tokenizer.id_to_token(tokenizer.pad_token_id) == "<|endoftext|>"
    assert asked(tokenizer) == "<|begin|><|endoftext|><|user_end|><|x|>False"


def test_a_configuration_with_added_tokens_goes_first(folder):
    config = {"eos_token": "<|im_end|>", "added_tokens_decoder": {}}
    tokenizer = folder(config, {"eos_token": "<|user_end|>", "pad_token": "<|endoftext|>"})
    assert tokenizer.id_to_token(tokenizer.eos_token_id) == "<|im_end|>"
    assert tokenizer.id_to_token(tokenizer.pad_token_id) == "<|endoftext|>"


def test_a_vocabulary_with_a_special_map_alone(folder, tmp_path):
    """The tokens of the published vocabulary are there, and the map names the end."""
    tokenizer = folder()
    tokenizer._core.model.save(str(tmp_path))
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "special_tokens_map.json").write_text('{"eos_token": "<|im_end|>"}')
    found = Tokenizer.from_path(tmp_path)
    assert found.id_to_token(found.eos_token_id) == "<|im_end|>"
    assert found.id_to_token(found.pad_token_id) == "<|endoftext|>"


@pytest.mark.parametrize("form", ["list", "files"])
def test_named_templates(folder, form, caplog):
    """`tool_use` with tools, else `default`; a variable chooses another one, or gives one."""
    if form == "list":
        tokenizer = folder({"chat_template": NAMED})
    else:
        files = {f"additional_chat_templates__{each['name']}": each["template"] for each in NAMED[1:]}
        tokenizer = folder(chat_template=NAMED[0]["template"], **files)
    assert asked(tokenizer) == "defaultHi"
    caplog.clear()
    assert asked(tokenizer, tools=[SCHEMA]) == "tool_useHi"
    assert "the tokenizer's chat template lists no tools" in caplog.text
    assert asked(tokenizer, variables={"chat_template": "rag"}) == "ragHi"
    assert (
        asked(tokenizer, variables={"chat_template": "{{ documents[0].title }}", "documents": [{"title": "T"}]}) == "T"
    )


def test_demonstrations_with_tools_take_the_template_for_tools(folder):
    turns = "{% for m in messages %}{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}{% if add_generation_prompt %}"
    turns += "assistant: {% endif %}"
    templates = [{"name": "default", "template": turns}, {"name": "tool_use", "template": "TOOLS " + turns}]
    tokenizer = folder({"chat_template": templates, "eos_token": "<|im_end|>"})
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]
    rows = [{"messages": messages}, {"messages": messages, "tools": [SCHEMA]}]
    found = [tokenizer.decode(turns.prompt_ids) for turns in read_demonstrations("rows", tokenizer, given=rows)]
    assert found == ["user: Hi<|im_end|>assistant: ", "TOOLS user: Hi<|im_end|>assistant: "]


def test_files_beside_a_template_of_the_configuration(folder):
    tokenizer = folder({"chat_template": "own{{ messages[0].content }}"}, additional_chat_templates__rag="rag")
    assert asked(tokenizer) == "ownHi"
    assert asked(tokenizer, variables={"chat_template": "rag"}) == "rag"


def test_named_templates_without_a_default(folder):
    tokenizer = folder({"chat_template": NAMED[1:]})
    with pytest.raises(UserError, match=r"has the chat templates tool_use, rag, and none is named default; choose one"):
        asked(tokenizer)
    assert asked(tokenizer, variables={"chat_template": "rag"}) == "ragHi"
    with pytest.raises(UserError, match=r"no chat template 'ragg' \(its own: tool_use, rag\)"):
        asked(tokenizer, variables={"chat_template": "ragg"})


@pytest.mark.parametrize("template", [3, {}, ["x"], [{"name": "x"}], [{"name": "x", "template": None}]])
def test_templates_of_another_form_are_refused(folder, template):
    with pytest.raises(UserError, match=r"tokenizer_config\.json: chat_template should be text, or a list of objects"):
        folder({"chat_template": template})


@pytest.mark.parametrize("name", ["tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"])
@pytest.mark.parametrize("kind", ["link", "folder"])
def test_an_entry_that_cannot_be_read_is_not_absent(folder, tmp_path, name, kind):
    """A link to nowhere would silently give another end token, and no chat template."""
    if kind == "link":
        (tmp_path / name).symlink_to(tmp_path / "nowhere")
    else:
        (tmp_path / name).mkdir()
    with pytest.raises(UserError, match=name):
        folder()


def test_variables_reach_conversations_and_demonstrations(folder):
    template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
        "{{ '' if enable_thinking is undefined else raise_exception('no') }}"
    )
    tokenizer = folder({"chat_template": template, "eos_token": "<|im_end|>"})
    given = {"enable_thinking": False}
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]
    read_demonstrations("rows", tokenizer, given=[{"messages": messages}])
    for refused in (
        lambda: read_demonstrations("rows", tokenizer, given=[{"messages": messages}], variables=given),
        lambda: TurnTemplate(tokenizer, variables=given),
        lambda: asked(tokenizer, variables=given),
    ):
        with pytest.raises(UserError, match="TemplateError: no"):
            refused()


def test_a_template_that_opens_a_thought(folder):
    """Questions and messages end alike; calls within a thought that is not closed call nothing."""
    template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}assistant: <think>\n{% endif %}"
    )
    tokenizer = folder({"chat_template": template.replace("{{ m.content }}", "{{ m.content.split('</think>')[-1] }}")})
    (question,) = convert_rows(given_rows([{"question": "2+2?", "answer": "#### 4"}], "rows"), tokenizer)
    assert tokenizer.decode(question.token_ids).endswith("<|im_end|>assistant: <think>\n")
    kept = (
        "{% for m in messages %}{{ m.role }}: {% if m.role == 'assistant' %}<think>\n{% endif %}"
        "{{ m.content }}<|im_end|>{% endfor %}{% if add_generation_prompt %}assistant: <think>\n{% endif %}"
    )
    own = TurnTemplate(folder({"chat_template": kept, "eos_token": "<|im_end|>"}))
    call = '<tool_call>{"name": "f"}</tool_call>'
    assert own.calls(f"I could {call}") == []
    assert [made.name for made in own.calls(f"I could {call}</think>{call}")] == ["f"]
    plain = TurnTemplate(folder({"chat_template": kept.replace("<think>\n", ""), "eos_token": "<|im_end|>"}))
    assert [made.name for made in plain.calls(f"I do {call}")] == ["f"]


def test_no_warning_without_control_tokens(folder, caplog):
    with caplog.at_level(logging.WARNING):
        asked(folder({"chat_template": "{{ messages[0].content }}"}))
    assert not caplog.messages
