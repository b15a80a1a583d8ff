"""Chat templates byte for byte as transformers renders them: its variables and filters, and TRL's own templates.

TRL's templates are read from an installed `trl`, which needs no dependencies here:
`pip install --no-deps trl==1.16.0`, then `pytest --slow tests/data/test_transformers_templates.py`.
"""

import itertools
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from trl_fields import folder

from mindrlhf.data.chat import Renderer, RenderingError, render_conversations
from mindrlhf.data.demonstrations import read_demonstrations
from mindrlhf.data.tokenizer import train_tokenizer
from mindrlhf.errors import UserError

CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": "é<'>"}}}
PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer", "description": "é"}}, "required": ["a"]}
TOOLS = [{"type": "function", "function": {"name": "add", "description": "Add.", "parameters": PARAMETERS}}]
TOKENS = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>"}


def user(text):
    return {"role": "user", "content": text}


def said(text, **more):
    return {"role": "assistant", "content": text, **more}


TALKS = {
    "one": [user("Hi")],
    "system": [{"role": "system", "content": "Be brief."}, user("Hi")],
    "turns": [user("Hi"), said("Hello."), user("And?")],
    "unicode": [user("<b>&\"'é 你好 😀 </b>\n  x ")],
    "thought": [user("Hi"), said("<think>\nhm\n</think>\n\nHello."), user("And?")],
    "half a thought": [user("Hi"), said("hm\n</think>\n\nHello."), user("And?")],
    "calls": [user("1+1?"), said("", tool_calls=[CALL]), {"role": "tool", "name": "add", "content": "2"}, user("So?")],
}


@pytest.fixture(scope="module")
def theirs():
    """transformers' rendering: a text, or its error."""
    return pytest.importorskip("transformers.utils.chat_template_utils").render_jinja_template


def expected(theirs, template, talk, tools=None, **variables):
    given = {"tools": tools, "documents": variables.pop("documents", None), "add_generation_prompt": True}
    return theirs([talk], chat_template=template, **given, **variables)[0][0]


TEMPLATES = {
    "json": "{{ messages | tojson }}{{ messages | tojson(ensure_ascii=true) }}",
    "indented": "{{ tools | tojson(indent=2) }}{{ messages | tojson(indent=4, separators=(',', ': '), sort_keys=1) }}",
    "compact": "{{ messages | tojson(separators=(',', ':')) }}",
    "nothing given": "{{ tools is none }}{{ documents is none }}{{ tools is defined }}{{ enable_thinking is defined }}",
    "time": "{{ strftime_now('%Y') }}{{ strftime_now('%%') }}",
    "loops": "{% for m in messages %}{% if loop.index == 2 %}{% break %}{% endif %}{% continue %}x{% endfor %}",
    "generation": "a\n  {%- generation -%}\n b{{ messages[0].content }}\n{% endgeneration %}\nc",
    "its scope": "{% set x = 1 %}{% generation %}{% set x = 2 %}{{ x }}{% endgeneration %}{{ x }}",
    "variables": "{{ enable_thinking }}{{ documents[0].title }}{{ bos_token }}{{ unk_token }}",
    "white space": "  {% if true %}\n  x\n  {% endif %}\n{# note #}\n  {{ 'y' }}\n\n",
    "refusal": "{{ raise_exception('no') }}",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_variables_and_filters(theirs, name):
    variables = {"enable_thinking": False, "documents": [{"title": "T"}]} if name == "variables" else {}
    template = TEMPLATES[name]

    def ours(talk, tools):
        return render_conversations([(talk, "x")], template, **TOKENS, **variables, tools=tools)[0]

    for talk, tools in itertools.product((TALKS["calls"], TALKS["unicode"]), (None, TOOLS)):
        if name == "refusal":
            with pytest.raises(UserError, match=r"fails \(TemplateError: no\)"):
                ours(talk, tools)
        else:
            assert ours(talk, tools) == expected(theirs, template, talk, tools, **TOKENS, **variables)


MARKED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}"
    "{% if m.content is defined and '<think>' not in m.content %}<think>\n\n</think>\n\n{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}<|im_end|>{% endgeneration %}\n"
    "{% else %}{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize("name", ["turns", "thought", "calls"])
def test_generation_blocks_are_what_is_trained(name):
    """The masks of transformers, which TRL's assistant_only_loss takes."""
    transformers = pytest.importorskip("transformers")
    tokenizer = train_tokenizer(["What is the capital of France? Paris."], 320)
    tokenizer.config["chat_template"] = MARKED
    hf = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer._core, chat_template=MARKED)
    talk = [*TALKS[name], said("Yes.")]
    options = {"return_dict": True, "return_assistant_tokens_mask": True}
    theirs = hf.apply_chat_template(talk, **options)
    (found,) = read_demonstrations("rows", tokenizer, given=[{"messages": talk}])
    ids = [*found.prompt_ids, *found.response_ids]
    trained = [*np.zeros(len(found.prompt_ids)), *found.sampled]
    assert ids == theirs["input_ids"][: len(ids)]
    assert trained == theirs["assistant_masks"][: len(ids)]
    assert not any(theirs["assistant_masks"][len(ids) :])


def trl_templates() -> list[Path]:
    trl = folder("trl")
    return sorted(trl.rglob("*.jinja")) if trl else []


@pytest.mark.slow
def test_the_templates_of_trl(theirs):
    """Every template with every conversation, with tools and without: the same text, or refused on both sides."""
    templates = trl_templates()
    if not templates:
        pytest.skip("trl is not installed: pip install --no-deps trl==1.16.0")
    same = refused = 0
    for path in templates:
        template = path.read_text(encoding="utf-8")
        with closing(Renderer(template, TOKENS)) as render:
            for (name, talk), tools in itertools.product(TALKS.items(), (None, TOOLS)):
                try:
                    right = expected(theirs, template, talk, tools, **TOKENS)
                except Exception:  # whatever the template raises
                    with pytest.raises(RenderingError):
                        render([{"messages": talk, "tools": tools, "add_generation_prompt": True}])
                    refused += 1
                    continue
                (text,) = render([{"messages": talk, "tools": tools, "add_generation_prompt": True}])
                assert text == right, (path.name, name, bool(tools))
                same += 1
    print(f"{len(templates)} templates: {same} renderings are the same, {refused} are refused on both sides")
    assert same > 10 * refused
