"""Sums for a calculator, and the conversations that demonstrate its use: worked out again, and written as ids."""

import json
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


def numbers(question: str) -> list[int]:
    return list(map(int, re.findall(r"\d+", question)))


def kind(conversation, row) -> str:
    """What a demonstration does; its words are checked on the way."""
    question, asked, *rest = conversation["messages"]
    assert [message["role"] for message in conversation["messages"]] == ["user", "assistant", "tool", "assistant"][
        : len(rest) + 2
    ]
    assert question["content"] == row["question"]
    right = gsm8k(
        "", conversation["messages"][-1]["content"], {"ground_truth": TASKS["calculator"].parse(row).ground_truth}
    )
    easy = max(numbers(row["question"])) < 10
    if not rest:
        assert right == easy
        return "from the head, easy" if easy else "from the head"
    if "tool_calls" in asked:
        (call,) = asked["tool_calls"]
        assert call["function"]["name"] == "calculator"
        assert rest[0]["content"] == tool(**call["function"]["arguments"])
        assert rest[1]["content"] == f"#### {rest[0]['content']}"
        assert right or set(numbers(call["function"]["arguments"]["expression"])) <= set(numbers(row["question"]))
        return "call" if right else "mistaken call"
    (read,) = Hermes().parse(asked["content"])
    assert rest[0]["content"] == read.error
    assert right == easy
    return "garbled call"


def test_demonstrations_call_or_are_careless():
    rows = calculator.generate(3000, seed=1, max_number=999)
    assert len({row["question"] for row in rows}) == 3000
    demonstrated = calculator.demonstrations(rows, careless_share=0.6, seed=1)
    counts = Counter(map(kind, demonstrated, rows))
    shares = {name: count / 3000 for name, count in counts.items()}
    slips = {"mistaken call": 0.06, "garbled call": 0.06}
    expected = slips | {"call": 0.8 * 0.4, "from the head": 0.8 * 0.48, "from the head, easy": 0.2 * 0.88}
    assert shares == pytest.approx(expected, abs=0.03)
    assert demonstrated == calculator.demonstrations(rows, careless_share=0.6, seed=1)
    assert demonstrated != calculator.demonstrations(rows, careless_share=0.6, seed=2)


def test_problems_are_worked_out():
    rows = calculator.generate(2000, seed=0, max_number=99)
    shapes = Counter()
    for row in rows:
        expression, value = row["answer"].partition(" ####")[0].split(" = ")
        given = set(numbers(row["question"]))
        assert set(numbers(expression)) == given
        assert given <= {*range(2, 7)} or given <= {*range(32, 100)}
        assert tool(expression) == value == TASKS["calculator"].parse(row).ground_truth
        assert int(value) >= 0
        bare = expression in row["question"]
        shapes["easy" if max(given) < 10 else "bare" if bare else "story"] += 1
    assert {name: count / 2000 for name, count in shapes.items()} == pytest.approx(
        {"easy": 0.2, "bare": 0.4, "story": 0.4}, abs=0.06
    )
    careful = calculator.demonstrations(rows, careless_share=0.0, seed=0)
    assert set(map(kind, careful, rows)) == {"call", "from the head, easy"}
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
        assert len(turns.prompt_ids) < 60
        assert len(turns.response_ids) < 144
        said = tokenizer.decode(turns.response_ids[turns.sampled])
        heard = tokenizer.decode(turns.response_ids[~turns.sampled])
        tools = [message["content"] for message in conversation["messages"] if message["role"] == "tool"]
        assert conversation["messages"][-1]["content"] in said
        assert all(f"tool\n{text}" in heard for text in tools)
    digits = tokenizer.encode("1234567890")
    assert np.array([len(tokenizer.decode([one])) for one in digits]).tolist() == [1] * 10
