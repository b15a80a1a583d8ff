"""Sums for a calculator, and the conversations that demonstrate its use: worked out again, and written as ids."""

import json
import operator
import re
from collections import Counter

import numpy as np
import pytest

from mindrlhf.data.demonstrations import read_demonstrations
from mindrlhf.data.tasks import TASKS, calculator
from mindrlhf.data.tokenizer import Tokenizer
from mindrlhf.data.tool_formats import Hermes
from mindrlhf.environments.ready.calculator import calculator as tool
from mindrlhf.errors import UserError
from mindrlhf.rewards.gsm8k import gsm8k

OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul}


def kind(conversation) -> str:
    """What a demonstration does; its words are checked on the way."""
    question, asked, *rest = conversation["messages"]
    assert [message["role"] for message in conversation["messages"]] == ["user", "assistant", "tool", "assistant"][
        : len(rest) + 2
    ]
    left, operation, right = re.search(r"(\d+) ([-+*]) (\d+)[?.]$", question["content"]).groups()
    truth = {"ground_truth": str(OPERATIONS[operation](int(left), int(right)))}
    right_answer = gsm8k("", conversation["messages"][-1]["content"], truth)
    if not rest:
        assert not right_answer
        return "guess"
    if "tool_calls" in asked:
        (call,) = asked["tool_calls"]
        assert call["function"]["name"] == "calculator"
        assert rest[0]["content"] == tool(**call["function"]["arguments"]) == truth["ground_truth"]
        assert right_answer
        return "call"
    (read,) = Hermes().parse(asked["content"])
    assert rest[0]["content"] == read.error
    assert not right_answer
    return "garbled call"


def test_demonstrations_call_guess_or_garble():
    rows = calculator.generate(3000, seed=1, max_number=999)
    assert len({re.search(r"\d.*\d", row["question"])[0] for row in rows}) == 3000
    assert {TASKS["calculator"].parse(row).ground_truth for row in rows[:50]} != {"0"}
    demonstrated = calculator.demonstrations(rows, careless_share=0.6, seed=1)
    assert [each["messages"][0]["content"] for each in demonstrated] == [row["question"] for row in rows]
    shares = {name: count / 3000 for name, count in Counter(map(kind, demonstrated)).items()}
    assert shares == pytest.approx({"call": 0.4, "guess": 0.54, "garbled call": 0.06}, abs=0.03)
    assert demonstrated == calculator.demonstrations(rows, careless_share=0.6, seed=1)
    assert demonstrated != calculator.demonstrations(rows, careless_share=0.6, seed=2)


def test_choices():
    rows = calculator.generate(300, seed=0, max_number=60, operations="*")
    assert all(re.fullmatch(r".* \d\d \* \d\d[?.]", row["question"]) for row in rows)
    assert all(kind(each) == "call" for each in calculator.demonstrations(rows, careless_share=0.0, seed=0))
    with pytest.raises(UserError, match="need numbers above 32"):
        calculator.generate(5, seed=0, max_number=32)


def test_synthesized_demonstrations_are_few_tokens(run_command, tmp_path):
    sizes = ("--train_size", 600, "--test_size", 10, "--max_number", 999, "--tokenizer_vocab_size", 512)
    run_command("synthesize", "--task", "calculator", "--careless_share", 0.5, "--output_dir", tmp_path, *sizes)
    tokenizer = Tokenizer.from_path(tmp_path)
    source = [json.loads(line) for line in (tmp_path / "demonstrations.jsonl").read_text().splitlines()]
    written = read_demonstrations(tmp_path / "demonstrations.jsonl", tokenizer)
    assert len(written) == len(source) == 600
    for conversation, turns in zip(source, written, strict=True):
        assert len(turns.prompt_ids) < 24
        assert len(turns.response_ids) < 80
        said = tokenizer.decode(turns.response_ids[turns.sampled])
        heard = tokenizer.decode(turns.response_ids[~turns.sampled])
        tools = [message["content"] for message in conversation["messages"] if message["role"] == "tool"]
        assert conversation["messages"][-1]["content"] in said
        assert all(f"tool\n{text}" in heard for text in tools)
    digits = tokenizer.encode("1234567890")
    assert np.array([len(tokenizer.decode([one])) for one in digits]).tolist() == [1] * 10
