"""Tasks: GSM8K's real rows, countdown and arithmetic rows checked by evaluating them again."""

import ast
import json
import math
import re
from fractions import Fraction

import pytest

from mindrlhf.data.source import given_rows, read_source
from mindrlhf.data.tasks import TASKS, arithmetic, countdown, get_task, multiplication, parse_rows
from mindrlhf.data.tasks.task import prompt_fields
from mindrlhf.errors import UserError

OPERATORS = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.Div: lambda a, b: a / b,
}
# What each kind of arithmetic question asks, read from its words; numbers in order of appearance.
MEANINGS = (
    (r"finds \d+ more\. How many \w+ does", lambda x, y: x + y),
    (r"has \d+ \w+ and \w+ has \d+\. How many \w+ do they have together", lambda x, y: x + y),
    (r"gave \d+ to \w+\. How many \w+ does \w+ have left", lambda x, y: x - y),
    (r"How many more", lambda x, y: x - y),
    (r"has \d+ bags with \d+ \w+ in each", lambda x, y: x * y),
    (r"finds \d+ more and gives \d+", lambda x, y, z: x + y - z),
    (r"lost \d+ and then bought \d+", lambda x, y, z: x - y + z),
    (r"has \d+ more than \w+\. How many \w+ do they have together", lambda x, y: x + (x + y)),
    (r"buys \d+ boxes .* already had \d+", lambda x, y, z: x * y + z),
    (r"fills \d+ boxes .* gives away \d+", lambda x, y, z: x * y - z),
)


def evaluate(node):
    """(value, numbers used) of an expression, in exact fractions."""
    if isinstance(node, ast.Constant):
        return Fraction(node.value), [node.value]
    (left, left_numbers), (right, right_numbers) = evaluate(node.left), evaluate(node.right)
    return OPERATORS[type(node.op)](left, right), left_numbers + right_numbers


@pytest.mark.parametrize(("split", "count"), [("train", 7473), ("test", 1319)])
def test_all_gsm8k_rows_parse(shared, split, count):
    rows = [TASKS["gsm8k"].parse(row.values) for row in read_source(shared / "data" / "gsm8k" / f"{split}.jsonl")]
    assert len(rows) == count
    assert all(re.fullmatch(r"-?\d+", row.ground_truth) for row in rows)
    for row in rows:
        assert row.answer.replace(",", "").rstrip().endswith(f"#### {row.ground_truth}")


@pytest.mark.parametrize(
    ("tail", "truth"),
    [
        *(("#### 1,234", "1234"), ("x #### 3 #### -5 000 \n", "-5000"), ("####2.50", "2.50"), ("#### 1/2", "1/2")),
        *(("#### 5 dollars", "5"), ("#### $5", "5"), ("#### 5\nDone.", "5"), ("#### 5%", "5"), ("#### 5.", "5")),
        *(("#### 1 000 km", "1000"), ("#### $2 million", "2000000"), ("#### x = 7", "7")),
    ],
)
def test_gsm8k_ground_truth(tail, truth):
    assert TASKS["gsm8k"].parse({"question": "q", "answer": tail}).ground_truth == truth


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"question": "q"}, "key 'answer' is missing .found: 'question'"),
        ({"answer": "#### 1"}, "key 'question' is missing"),
        ({"question": " ", "answer": "#### 1"}, "key 'question' should be text"),
        ({"question": 3, "answer": "#### 1"}, "key 'question' should be text, and is 3"),
        ({"question": "q", "answer": "so 7"}, "no final answer after ####"),
        ({"question": "q", "answer": "so #### ,"}, "no final answer after ####"),
        ({"question": "q", "answer": "#### 5 ####"}, "no final answer after ####"),
        ({"question": "q", "answer": "#### 3:30"}, "key 'answer' has '3:30' after ####, which gives no number"),
        ({"question": "q", "answer": "#### 10 = ten"}, "gives no number"),
        ({"question": "q", "answer": "#### 9+9"}, "gives no number"),
    ],
)
def test_malformed_gsm8k_rows(row, message):
    with pytest.raises(ValueError, match=message):
        TASKS["gsm8k"].parse(row)


@pytest.mark.parametrize("key", ["nums", "numbers"])
def test_countdown_row(key):
    row = TASKS["countdown"].parse({key: [44, 19, 35], "target": 98})
    assert row.ground_truth == '{"target":98,"numbers":[44,19,35]}'
    assert (row.answer, re.findall(r"\d+", row.question)) == ("", ["98", "44", "19", "35"])


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"target": 3}, "key 'nums' should be a list"),
        ({"nums": [3], "target": 3}, "key 'nums' should be a list of two or more"),
        ({"nums": [3, 4.5], "target": 3}, "key 'nums'"),
        ({"nums": [3, True], "target": 3}, "key 'nums'"),
        ({"numbers": [3, 4]}, "key 'target' should be an integer, and is None"),
        ({"nums": [3, 4], "target": "7"}, "key 'target'"),
        ({"nums": [3, 4], "target": 7, "answer": 7}, "key 'answer' should be text"),
    ],
)
def test_malformed_countdown_rows(row, message):
    with pytest.raises(ValueError, match=message):
        TASKS["countdown"].parse(row)


def test_held_out_countdown_problems_are_like_the_others():
    """There are few problems of two numbers: drawn alone, they would all be at the beginning."""
    sizes = [len(row["nums"]) for row in countdown.generate(1200, seed=0, max_number=20, operands=(2, 3))]
    assert sizes[:1000].count(2) > 100
    assert sizes[1000:].count(2) / 200 == pytest.approx(sizes[:1000].count(2) / 1000, abs=0.1)


def test_countdown_problems_are_solvable():
    rows = countdown.generate(500, seed=3, max_number=60, operands=(2, 3, 4))
    assert {len(row["nums"]) for row in rows} == {2, 3, 4}
    used = set()
    for row in rows:
        expression = re.fullmatch(r"<answer>(.*)</answer>", row["answer"]).group(1)
        value, numbers = evaluate(ast.parse(expression, mode="eval").body)
        assert value == row["target"]
        assert sorted(numbers) == sorted(row["nums"])
        assert 1 <= row["target"] <= 60
        assert all(1 <= number <= 60 for number in row["nums"])
        used |= set(re.findall(r"[-+*/]", expression))
        assert json.loads(TASKS["countdown"].parse(row).ground_truth)["target"] == value
    assert used == set("+-*/")
    assert len({(tuple(sorted(row["nums"])), row["target"]) for row in rows}) == 500


@pytest.mark.parametrize("max_number", [12, 99])
def test_arithmetic_answers_are_right(max_number):
    seen = set()
    rows = arithmetic.generate(1000, seed=1, max_number=max_number)
    for row in rows:
        kinds = [kind for kind, (words, _) in enumerate(MEANINGS) if re.search(words, row["question"])]
        assert len(kinds) == 1, row["question"]
        numbers = [int(number) for number in re.findall(r"\d+", row["question"])]
        right = MEANINGS[kinds[0]][1](*numbers)
        parsed = TASKS["arithmetic"].parse(row)
        assert (parsed.question, parsed.answer, parsed.ground_truth) == (row["question"], row["answer"], str(right))
        steps = re.findall(r"(\d+)([-+*])(\d+)=(\d+)", row["answer"])
        assert row["answer"] == f"{' '.join(f'{a}{o}{b}={c}' for a, o, b, c in steps)} #### {right}"
        for left, operation, other, result in steps:
            assert eval(f"{left}{operation}{other}") == int(result)
            assert 0 <= int(result) <= max_number
        assert int(steps[-1][3]) == right
        assert max(numbers) <= max_number
        seen.add(kinds[0])
    assert seen == set(range(len(MEANINGS)))
    assert len({row["question"] for row in rows}) == len(rows)


def test_arithmetic_choices():
    rows = arithmetic.generate(300, seed=0, max_number=20, operations="+-", two_step_share=0.0)
    assert all(re.fullmatch(r"\d+[-+]\d+=(\d+) #### \1", row["answer"]) for row in rows)
    rows = arithmetic.generate(300, seed=0, max_number=20, operations="+", two_step_share=1.0)
    assert all(re.fullmatch(r"\d+\+\d+=\d+ \d+\+\d+=(\d+) #### \1", row["answer"]) for row in rows)


@pytest.mark.parametrize("generate", [arithmetic.generate, countdown.generate])
def test_generators_depend_on_the_seed_alone(generate):
    assert generate(50, seed=7) == generate(50, seed=7)
    assert generate(50, seed=7) != generate(50, seed=8)


def test_too_few_problems():
    with pytest.raises(UserError, match="500 different countdown problems are asked for, and there are about 5"):
        countdown.generate(500, seed=0, max_number=2, operands=(2,))
    with pytest.raises(UserError, match="9000 different arithmetic problems are asked for, and there are about 7"):
        arithmetic.generate(9000, seed=0, max_number=4, operations="+", two_step_share=0)
    with pytest.raises(UserError, match="leaves no problems"):
        arithmetic.generate(5, seed=0, operations="*")
    with pytest.raises(UserError, match="leaves no problems"):
        arithmetic.generate(5, seed=0, max_number=3)


def test_registry():
    assert set(TASKS) >= {"gsm8k", "countdown", "arithmetic"}
    assert all(get_task(name).name == name for name in TASKS)
    with pytest.raises(UserError, match="--dataset_type gsm: unknown; give one of gsm8k, countdown, arithmetic"):
        get_task("gsm")


def test_multiplication_answers_are_right():
    rows = TASKS["multiplication"]
    drawn = multiplication.generate(500, seed=2, max_number=250)
    assert len({tuple(sorted(row["factors"])) for row in drawn}) == 500
    for row in drawn:
        left, right = row["factors"]
        assert min(left, right) >= 2
        assert max(left, right) <= 250
        parsed = rows.parse(row)
        assert (parsed.question, parsed.ground_truth) == (f"What is {left} * {right}?", str(left * right))
        worked, _, final = row["answer"].partition(" #### ")
        assert int(final) == left * right
        for side in worked.split("="):  # every step of the chain has the product's value
            assert sum(math.prod(map(int, part.split("*"))) for part in side.split("+")) == left * right
    assert {row["answer"].count("=") for row in drawn} == {1, 3}
    assert drawn == multiplication.generate(500, seed=2, max_number=250)


@pytest.mark.parametrize("factors", [None, [3], [3, 4, 5], [3, 4.0], [True, 2], "3*4"])
def test_malformed_multiplication_rows(factors):
    with pytest.raises(ValueError, match="key 'factors' should be a list of two integers"):
        TASKS["multiplication"].parse({"factors": factors})


def test_careless_countdown_adds_all_numbers():
    rows = countdown.generate(400, seed=5, max_number=30, operands=(2, 3))
    shown = countdown.demonstrations(rows, careless_share=0.5, seed=1)
    assert shown == countdown.demonstrations(rows, careless_share=0.5, seed=1)
    assert countdown.demonstrations(rows, careless_share=0.0, seed=1) == rows
    sums = 0
    for row, other in zip(rows, shown, strict=True):
        assert (other["nums"], other["target"]) == (row["nums"], row["target"])
        total = f"<answer>{'+'.join(map(str, row['nums']))}</answer>"
        assert other["answer"] in (row["answer"], total)
        sums += other["answer"] == total
    assert 0.4 < sums / len(rows) < 0.75


OWN_ROW = {"problem": "How many?", "solution": {"text": "so 3", "final": 3}, "level": 5, "tags": ["a"], "none": None}


def parsed(row, name, pairs=()):
    """The problem of a row, and its fields."""
    task, (problem,) = parse_rows(given_rows([row], "rows"), name, pairs)
    return problem, prompt_fields(task.name, problem)


def test_a_users_rows_by_a_field_map():
    pairs = ("question=problem", "ground_truth=solution.final", "answer=solution.text")
    row, fields = parsed(OWN_ROW, "fields", pairs)
    assert (row.question, row.ground_truth, row.answer) == ("How many?", 3, "so 3")
    types = {"solution": "json", "level": "json", "tags": "json", "none": "none", "ground_truth": "json"}
    assert json.loads(fields.pop("json_fields")) == types
    assert fields == {
        "task": "fields",
        "question": "How many?",
        "ground_truth": "3",
        "level": "5",
        "tags": '["a"]',
        "solution": '{"text": "so 3", "final": 3}',
        "answer": "so 3",
    }
    assert parsed({"problem": "q", "worked": "#### 4"}, None, ("question=problem", "answer=worked"))[1] == {
        "task": "gsm8k",
        "question": "q",
        "answer": "#### 4",
        "ground_truth": "4",
    }
    assert TASKS["fields"].parse({"question": "q", "ground_truth": "g"}).answer == ""


@pytest.mark.parametrize("missing", [{}, *({"ground_truth": value} for value in (None, "", " ", math.nan))])
def test_a_users_rows_without_a_ground_truth(missing):
    assert "ground_truth" not in parsed({"question": "q", **missing}, "fields")[1]


def test_a_field_map_to_a_missing_value():
    assert "ground_truth" not in parsed(OWN_ROW, "fields", ("question=problem", "ground_truth=none"))[1]


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        (("question=prolbem", "ground_truth=level"), "key 'prolbem' of --fields is missing .found: 'problem'"),
        (("question=problem", "ground_truth=solution.end"), "key 'solution.end' of --fields is missing .found: 'text'"),
        (("question=problem", "ground_truth=level.x"), r"key 'level.x' of --fields is missing\.$"),
        (("question=problem", "ground_truth=title"), "key 'title' of --fields is missing"),
    ],
)
def test_field_maps_that_do_not_fit(pairs, message):
    with pytest.raises(UserError, match=f"rows, row 0: not a fields row: {message}"):
        parsed(OWN_ROW, "fields", pairs)


@pytest.mark.parametrize("pair", ["question", "=problem", "question="])
def test_field_maps_that_cannot_be_read(pair):
    with pytest.raises(UserError, match=f"--fields {pair}: should be KEY=THEIRS"):
        parsed(OWN_ROW, "fields", (pair,))
