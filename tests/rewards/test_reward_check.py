"""`mindrlhf reward-check`: rewards tried on dataset rows before training."""

import json
import re
import shlex

import pytest

from mindrlhf.cli import main
from mindrlhf.commands.reward_check import _function
from mindrlhf.configs.loading import load_grpo_config
from mindrlhf.data.convert_problems import convert
from mindrlhf.data.tasks import arithmetic, countdown
from mindrlhf.data.tokenizer import Tokenizer, train_tokenizer
from mindrlhf.errors import UserError


@pytest.fixture(autouse=True)
def _wide_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")


@pytest.fixture
def check(capsys):
    """Runs the command; gives (exit code, lines of cells, everything printed)."""

    def run(*arguments):
        code = main(["reward-check", *map(str, arguments)])
        output = "".join(capsys.readouterr())
        cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in output.splitlines() if "│" in line]
        return code, cells, output

    return run


@pytest.fixture
def problems(tmp_path):
    """A JSONL file of 20 arithmetic problems."""
    rows = arithmetic.generate(20, seed=0)
    path = tmp_path / "problems.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def summary(cells, function):
    """mean, min, max, scored, abstained, failed, timed out of a function."""
    return next(row[1:8] for row in cells if row[0] == function and len(row) == 9)


def test_reference_answers_of_json_rows(check, problems):
    code, cells, output = check("--reward", "gsm8k", "--reward", "gsm8k_strict", "--data", problems, "--rows", 5)
    assert code == 0
    assert summary(cells, "gsm8k") == ["1", "1", "1", "5", "0", "0", "0"]
    assert summary(cells, "gsm8k_strict") == ["1", "1", "1", "5", "0", "0", "0"]
    assert [row[0] for row in cells if len(row) == 7 and row[2] == "gsm8k"] == ["0", "1", "2", "3", "4"]
    assert "failed on row" not in output


def test_another_task(check, tmp_path):
    rows = countdown.generate(3, seed=0)
    path = tmp_path / "countdown.json"
    path.write_text(json.dumps(rows))
    _, cells, _ = check("--reward", "countdown", "--data", path, "--dataset_type", "countdown")
    assert summary(cells, "countdown") == ["1", "1", "1", "3", "0", "0", "0"]
    path.write_text(json.dumps([{**row, "answer": ""} for row in rows]))
    code, _, output = check("--reward", "countdown", "--data", path, "--dataset_type", "countdown")
    assert code == 2
    assert "no row has a reference answer" in output


def test_one_completion_for_every_row(check, problems):
    _, cells, _ = check("--reward", "gsm8k", "--data", problems, "--rows", 4, "--completion", "#### nothing")
    assert summary(cells, "gsm8k") == ["0", "0", "0", "4", "0", "0", "0"]


def test_completions_of_a_file(check, problems, tmp_path):
    truths = [json.loads(line)["answer"].split("####")[1].strip() for line in problems.read_text().splitlines()]
    path = tmp_path / "completions.jsonl"
    path.write_text("".join(json.dumps({"completion": f"#### {truth}"}) + "\n" for truth in (*truths[:2], "no")))
    _, cells, _ = check("--reward", "gsm8k", "--data", problems, "--completions", path)
    assert [row[3] for row in cells if len(row) == 7] == ["1", "1", "0"]
    dump = [{"prompt_id": row, "completion": f"#### {truths[row]}<|im_end|>"} for row in (7, 7, 3)]
    path.write_text("".join(json.dumps(row) + "\n" for row in dump))
    _, cells, _ = check("--reward", "gsm8k_strict", "--data", problems, "--completions", path)
    assert [(row[0], row[3]) for row in cells if len(row) == 7] == [("7", "1"), ("7", "1"), ("3", "1")]


def test_faults_are_shown_with_their_input(check, problems, tmp_path):
    source = """
import time
def fails(prompt, completion, fields):
    if "9" in fields["ground_truth"]:
        raise KeyError("[bold]no[/bold]")
    return {"score": 0.5, "letters": len(completion)}
def hangs(completion, ground_truth):
    time.sleep(100)
def abstains(completion, ground_truth):
    return None
"""
    path = tmp_path / "mine.py"
    path.write_text(source)
    rewards = [argument for name in ("fails", "hangs", "abstains") for argument in ("--reward", f"{path}:{name}")]
    code, cells, output = check(
        *rewards, "--data", problems, "--timeout", 0.2, "--rows", 20, "--completion", "twelve chars"
    )
    assert code == 1  # one of them on every row
    failed = sum("9" in json.loads(line)["answer"].split("####")[1] for line in problems.read_text().splitlines())
    assert 0 < failed < 20
    assert summary(cells, "fails") == ["0.5", "0.5", "0.5", str(20 - failed), "0", str(failed), "0"]
    assert summary(cells, "hangs") == ["-", "-", "-", "0", "0", "17", "3"]
    assert summary(cells, "abstains") == ["-", "-", "-", "0", "20", "0", "0"]
    assert any(row[4] == "letters 12" for row in cells if len(row) == 7)
    assert output.count("fails failed on row") == 1
    assert "KeyError: '[bold]no[/bold]' (mine.py, line 5)" in output
    assert "completion: twelve chars" in output


def test_a_mindrecord_with_its_tokenizer(check, problems, tmp_path):
    train_tokenizer([problems.read_text()], 400).save(tmp_path / "tokenizer")
    tokenizer = Tokenizer.from_path(tmp_path / "tokenizer")
    data = tmp_path / "problems.mindrecord"
    convert(problems, data, tokenizer, template="plain", progress=False)
    code, cells, _ = check("--reward", "gsm8k", "--data", data, "--completion", "#### 0", "--rows", 3)
    assert code == 0
    assert summary(cells, "gsm8k")[3] == "3"
    code, _, output = check("--reward", "gsm8k", "--data", data)
    assert code == 2
    assert "--tokenizer_path" in output
    args = ("--tokenizer_path", tmp_path / "tokenizer", "--max_new_tokens", 500)
    rewards = ("--reward", "gsm8k_strict", "--reward", "soft_overlong", "--reward", "length target=10")
    code, cells, _ = check(*rewards, "--data", data, *args)
    assert code == 0
    assert summary(cells, "gsm8k_strict") == ["1", "1", "1", "16", "0", "0", "0"]
    assert summary(cells, "soft_overlong")[3:] == ["16", "0", "0", "0"]
    assert summary(cells, "length")[3:] == ["16", "0", "0", "0"]
    code, _, output = check("--reward", "length target=10", "--data", problems)
    assert code == 1
    assert "the field 'response_length' (tokens) is missing" in output


def test_escape_codes_are_shown_as_text(check, problems, tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("def fails(completion, ground_truth): raise ValueError(completion)\n")
    code, _, output = check("--reward", f"{path}:fails", "--data", problems, "--completion", "\x1b[2Jred\x07")
    assert code == 1
    assert "\x1b[2J" not in output
    assert "\x07" not in output
    assert "completion: \\u001b[2Jred\\u0007" in output


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--reward", "gsmk8"], "nearest: 'gsm8k'"),
        (["--reward", "length 100"], "arguments as KEY=VALUE"),
        (["--reward", ""], "arguments as KEY=VALUE"),
        (["--reward", "length"], "give it by args: {target: 200}"),
        (["--reward", "gsm8k", "--rows", "0"], "--rows 0"),
        (["--reward", "gsm8k", "--timeout", "0"], "--timeout 0"),
        (["--reward", "gsm8k", "--data", "none.jsonl"], "no such file"),
        (["--reward", "gsm8k", "--data", "none.mindrecord"], "no such MindRecord"),
        (["--reward", "gsm8k", "--dataset_type", "chess"], "chess"),
        (["--reward", "countdown", "--dataset_type", "countdown"], "line 1: not a countdown row"),
        (["--reward", "gsm8k", "--completions", "{folder}/bad.jsonl"], "bad.jsonl, line 1: key 'completion'"),
        (["--reward", "gsm8k", "--completions", "{folder}/far.jsonl"], "far.jsonl, line 1: there is no dataset row"),
    ],
)
def test_mistakes(check, problems, tmp_path, arguments, expected):
    (tmp_path / "bad.jsonl").write_text('{"text": 1}\n')
    (tmp_path / "far.jsonl").write_text('{"completion": "a", "prompt_id": 20}\n')
    code, _, output = check("--data", problems, *(text.format(folder=tmp_path) for text in arguments))
    assert code == 2
    assert expected in output
    assert len(output.strip().splitlines()) == 1


@pytest.mark.parametrize(
    "value",
    ["1e-3", "1_000", "0x10", "yes", "null", "'[1e3, a]'", "'{a: 1e-3}'", "012", "1:30", "2024-01-01", ".5", "", "~"],
)
def test_arguments_are_read_as_a_run_reads_them(value):
    [text] = shlex.split(value) or [""]
    of_run = load_grpo_config(None, [f"reward.functions.0.args.scale={text}"]).reward.functions[0]
    assert _function(f"gsm8k scale={value}") == of_run


def test_arguments_that_cannot_be_read():
    for text, problem in {
        "gsm8k scale": "give a name, then arguments as KEY=VALUE",
        "": "give a name",
        "gsm8k 'open": "give a name",
        "gsm8k a=[1": "override 'args.a=[1' is not valid YAML",
    }.items():
        with pytest.raises(UserError, match=re.escape(problem)):
            _function(text)


def test_texts_and_token_ids(check, problems, tmp_path):
    source = """
def verl(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": 1.0, "acc": True, "pred": solution_str.split()[-1]}
def ids(completion_ids, **kwargs):
    return [len(one) for one in completion_ids]
"""
    (tmp_path / "mine.py").write_text(source)
    named = ("--reward", f"{tmp_path}/mine.py:verl", "--data", problems, "--rows", 2, "--completion", "it is 42")
    _, cells, _ = check(*named)
    assert any(row[4] == "acc 1" for row in cells if len(row) == 7)
    assert any(row[4] == "pred 42" for row in cells if len(row) == 7)
    ids = ("--reward", f"{tmp_path}/mine.py:ids", "--data", problems, "--rows", 2, "--completion", "it is 42")
    code, _, output = check(*ids)
    assert code == 1
    assert "token ids are not known here" in output
    train_tokenizer(["it is 42"], 300).save(tmp_path / "tokenizer")
    length = len(Tokenizer.from_path(tmp_path / "tokenizer").encode("it is 42"))
    _, cells, _ = check(*ids, "--tokenizer_path", tmp_path / "tokenizer")
    assert summary(cells, "ids")[:4] == [str(length)] * 3 + ["2"]


@pytest.mark.parametrize("name", ["countdown", "gsm8k_strict", "knights_and_knaves"])
def test_eighty_columns_break_no_name(check, problems, monkeypatch, name):
    monkeypatch.setenv("COLUMNS", "80")
    _, cells, output = check("--reward", name, "--reward", "gsm8k", "--data", problems, "--rows", 1)
    assert [row[2] for row in cells if len(row) == 7 and row[2]] == [name, "gsm8k"]
    assert [row[0] for row in cells if len(row) == 9] == [name, "gsm8k"]
    assert max(map(len, output.splitlines())) <= 80


def test_a_long_name_is_shown_to_its_end(check, problems, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    function = "a_function_of_a_name_that_is_much_longer_than_a_column"
    (tmp_path / "own.py").write_text(f"def {function}(completion, **fields):\n    return 1.0\n")
    _, cells, _ = check("--reward", f"{tmp_path / 'own.py'}:{function}", "--data", problems, "--rows", 1)
    assert function in "".join(row[0] for row in cells if len(row) == 9)
