"""Ids in = ids out: 10,000 random conversations of a stand-in for the engine, against whole renderings.

The stand-in draws ids that mostly do not survive decoding and encoding, so that a re-encoded turn would be found. The
oracle renders each conversation once, as a whole, with markers in place of what was drawn.
"""

import random

import jinja2
import pytest
from sample_conversations import THINKING
from slow_cases import few_of

from mindrlhf.data.tool_formats import FORMATS, load_tool_format
from mindrlhf.data.turns import STRIPPING, TurnTemplate

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SAID = [
    "",
    " ",
    "\n",
    "4",
    "é́ 日本 🙂\u2028",
    "Error: division by zero",
    "{{ x }}{% x %}",
    "<tool_response>",
    "a\r\n\tb",
]
SAID += ["</think>", "Traceback (most recent call last):\n  File\n" * 3, "```", "\ufffd\u200b", "%s\\n"]
WRITTEN = {
    "hermes": [
        '<tool_call>\n{"name": "f", "arguments": {"x": "日"}}\n</tool_call>',
        "<tool_call>{",
        "4 🙂",
        "</think>",
    ],
    "retool": ["<code>\n```python\nprint('é')\n```\n</code>", "<code>print(2)</code>", "<code>print(", "So: 4"],
    "python_block": ["\n```python\nprint('é')\n```\n", "\n```python\nprint(", "```", "4"],
}


class Counted:
    """A tokenizer that remembers the texts that it encodes."""

    def __init__(self, tokenizer):
        self._tokenizer, self.texts = tokenizer, []

    def __getattr__(self, name):
        assert name != "encode_batch"
        return getattr(self._tokenizer, name)

    def encode(self, text):
        self.texts.append(text)
        return self._tokenizer.encode(text)


class Engine:
    """Draws turns at random, appends the ids of the answers, and ends at a limit of tokens wherever it falls."""

    def __init__(self, template: TurnTemplate, tokenizer, name: str, seed: int):
        self.template, self.tokenizer, self.random = template, tokenizer, random.Random(seed)
        self.written = [tokenizer.encode(text) for text in WRITTEN[name]]
        self.think = [tokenizer.encode(text) for text in ("<think>\n", "\n</think>\n\n")]

    def draw(self) -> list[int]:
        """Draw a turn: any ids, calls and reasoning, with an end token or without it."""
        pick, turn = self.random, []
        for _ in range(pick.randrange(4)):
            turn += pick.choice([pick.choice(self.written), pick.choices(range(self.tokenizer.size - 3), k=5)])
        if pick.random() < 0.3:
            turn = self.think[0] + turn[: len(turn) // 2] + self.think[1] + turn[len(turn) // 2 :]
        if self.template.tool_format.stop_strings and pick.random() < 0.6:
            return turn + self.written[0]
        return [*turn, pick.choice([self.template.end_id] * 9 + [self.tokenizer.pad_token_id])]

    def answer(self, turn: list[int]) -> list[dict[str, str]]:
        """Answer the calls of a turn; without one, say something as the user, or nothing at all."""
        calls = self.template.tool_format.parse(self.tokenizer.decode(turn))
        if calls:
            return [{"role": "tool", "content": call.error or self.random.choice(SAID)} for call in calls]
        return [{"role": "user", "content": self.random.choice(SAID)}] if self.random.random() < 0.5 else []

    def converse(self, question: str, limit: int):
        """(prompt ids, response ids, sampled, [(turn, messages, ids)]) of one conversation."""
        prompt = self.template.prompt([{"role": "user", "content": question}]).tolist()
        response, sampled, turns = [], [], []
        while len(response) < limit:
            turn = self.draw()
            room = limit - len(response)
            response, sampled = response + turn[:room], sampled + [True] * len(turn[:room])
            if len(turn) >= room or not (messages := self.answer(turn)):
                break
            ids = self.template.answers(messages, turn).tolist()
            room = limit - len(response)
            response, sampled = response + ids[:room], sampled + [False] * len(ids[:room])
            turns.append((turn, messages, ids))
        return prompt, response, sampled, turns


def whole(environment, engine: Engine, question: str, turns) -> list[str]:
    """The texts between the drawn turns, cut out of one rendering of the whole conversation."""
    own, end = engine.template.tool_format, engine.template.end_id
    messages, inline = [{"role": "user", "content": question}], ""
    for number, (turn, answers, _) in enumerate([*turns, ([], [], [])]):
        marked = f"<think>\n\1{number}\n</think>\n\nx\2{number}"
        if inline:
            messages[-1]["content"] += inline + marked
        else:
            messages.append({"role": "assistant", "content": marked})
        inline, texts = "", [message["content"] for message in answers]
        if [message["role"] for message in answers[:1]] == ["tool"]:
            if own.stop_strings and turn[-1] != end:
                inline = "".join(f"\n<interpreter>\n{text}\n</interpreter>\n" for text in texts)
            elif own.stop_strings:
                text = "\n".join(f"\n<interpreter>\n{text}\n</interpreter>\n" for text in texts)
                messages.append({"role": "user", "content": text})
            elif own.answer("") is not None:
                text = "\n".join(f"```output\n{text}\n```" for text in texts)
                messages.append({"role": "user", "content": text})
            else:
                messages += answers
        else:
            messages += answers
    text = environment.render(messages=messages)
    return [text.partition(f"x\2{number}")[2].partition(f"<think>\n\1{number + 1}")[0] for number in range(len(turns))]


def check(tokenizer, template: str, name: str, count: int, seed: int) -> int:
    """Compare `count` conversations; returns how many turns would not have survived being encoded again."""
    counted = Counted(tokenizer)
    engine = Engine(TurnTemplate(counted, template, tool_format=load_tool_format(name)), tokenizer, name, seed)
    for condition in STRIPPING:
        template = template.replace(condition, "true")
    compiled = jinja2.Environment(trim_blocks=True, lstrip_blocks=True).from_string(template)
    end, altered, turned = tokenizer.id_to_token(engine.template.end_id), 0, 0
    for number in range(count):
        question, limit = engine.random.choice(SAID) + str(number), engine.random.randrange(1, 300)
        counted.texts.clear()
        prompt, response, sampled, turns = engine.converse(question, limit)
        assert len(counted.texts) == 1 + len(turns)  # once for the prompt and each answer
        assert len(sampled) == len(response) <= limit
        expected, places = [], []
        between = whole(compiled, engine, question, turns)
        for (turn, _, ids), text in zip(turns, between, strict=True):
            assert ids == tokenizer.encode(text.removeprefix(end) if turn[-1:] == [engine.template.end_id] else text)
            expected, places = expected + turn + ids, places + [True] * len(turn) + [False] * len(ids)
            altered += tokenizer.encode(tokenizer.decode(turn)) != turn
        shared = min(len(expected), len(response))
        assert (response[:shared], sampled[:shared]) == (expected[:shared], places[:shared])
        assert all(sampled[shared:])  # the last turn
        assert prompt == tokenizer.encode(compiled.render(messages=[{"role": "user", "content": question}], **PROMPT))
        turned += len(turns)
    assert turned > count // 2
    return altered


PROMPT = {"add_generation_prompt": True}


@pytest.mark.parametrize("name", few_of(["hermes"], [name for name in FORMATS if name != "hermes"]))
def test_random_conversations(small, name):
    assert check(small, CHATML, name, 800, seed=1) > 160


def test_with_reasoning_that_the_template_would_strip(small):
    assert check(small, THINKING, "hermes", 800, seed=2) > 160


def test_with_qwen_s_own_tokenizer_and_template(qwen):
    if qwen.chat_template is None:
        pytest.skip("Qwen2.5's tokenizer_config.json is not here")
    assert check(qwen, qwen.chat_template, "hermes", 400, seed=3) > 80
