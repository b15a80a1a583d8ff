"""Conversations with tools, a template that strips reasoning, and the words that are trained on."""

CODE = "print('é <b> & \"')"
CALL = {"type": "function", "function": {"name": "code_interpreter", "arguments": {"code": CODE}}}
# The keys in the order of a parquet file's columns, which the prompt keeps.
TOOLS = [{"function": {"description": "Run <code> & print.", "name": "code_interpreter"}, "type": "function"}]
MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "日本 1+1?\n"},
    {"role": "assistant", "content": "<think>\nhm\n</think>\n\nLet me see.", "tool_calls": [CALL, CALL]},
    {"role": "tool", "content": "é\n", "name": "code_interpreter"},
    {"role": "tool", "content": ""},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": " Error: no <tool_call>"},
    {"role": "assistant", "content": "It is 2."},
    {"role": "user", "content": "Sure?"},
    {"role": "assistant", "content": "Yes."},
]
# In the manner of Qwen3's: reasoning stays in turns behind the last question, and the very last turn has some always.
THINKING = """
{%- set ns = namespace(last_query_index=0) %}
{%- for message in messages %}
    {%- if message.role == "user" %}
        {%- set ns.last_query_index = loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content.split('</think>')[-1].lstrip('\\n') %}
    {%- set reasoning_content = '' %}
    {%- if '</think>' in message.content %}
        {%- set reasoning_content = message.content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.role == "assistant" and loop.index0 > ns.last_query_index %}
        {%- if loop.last or (not loop.last and reasoning_content) %}
            {{- '<think>\\n' + reasoning_content + '\\n</think>\\n\\n' }}
        {%- endif %}
    {%- endif %}
    {{- content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


def drawn_text(tokenizer, found) -> str:
    """The text of the tokens that are trained on."""
    return tokenizer.decode(found.response_ids[found.sampled])
