"""`mindrlhf data` and `mindrlhf synthesize` as commands, and the script under MindRLHF's name."""

import json
import os
import subprocess
import sys

import pytest

from mindrlhf.data.mindrecord import read_pairs, read_prompts
from mindrlhf.data.tasks import countdown
from mindrlhf.data.tokenizer import Tokenizer
from mindrlhf.errors import UserError


@pytest.fixture
def quick(run_command, tmp_path):
    """A small synthesised folder: train.jsonl, test.jsonl and a tokenizer."""
    folder = tmp_path / "quick"
    run_command(
        *("synthesize", "--output_dir", folder, "--train_size", 60, "--test_size", 20),
        *("--max_number", 20, "--tokenizer_vocab_size", 300),
    )
    return folder


def load(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_synthesize_then_data(quick, run_command, tmp_path, capsys):
    files = ["merges.txt", "test.jsonl", "tokenizer.json", "tokenizer_config.json", "train.jsonl", "vocab.json"]
    assert sorted(file.name for file in quick.iterdir()) == files
    output = tmp_path / "a.mindrecord"
    run_command(
        *("data", "--vocab_path", quick / "vocab.json", "--merges_file_path", quick / "merges.txt"),
        *("--file_path", quick / "train.jsonl", "--output_path", output),
        *("--dataset_type", "arithmetic", "--template", "plain", "--max_prompt_length", 80),
    )
    assert f"{output}: 60 rows, 0 dropped, 0 truncated; max_prompt_length 80, seq_length 128" in capsys.readouterr().out
    tokenizer = Tokenizer.from_path(quick)
    assert tokenizer.size == 300
    rows = load(quick / "train.jsonl")
    for prompt, (_, answer_ids), row in zip(read_prompts(output), read_pairs(output), rows, strict=True):
        assert tokenizer.decode(prompt.token_ids) == row["question"] + "\n"
        assert tokenizer.decode(answer_ids) == row["answer"] + "<|im_end|>"
        assert prompt.fields["ground_truth"] == row["answer"].split()[-1]


def test_synthesized_splits_are_disjoint_and_repeatable(quick, run_command, tmp_path):
    train, test = load(quick / "train.jsonl"), load(quick / "test.jsonl")
    assert (len(train), len(test)) == (60, 20)
    assert not {row["question"] for row in train} & {row["question"] for row in test}
    sizes = ("--train_size", 60, "--test_size", 20, "--max_number", 20, "--tokenizer_vocab_size", 300)
    run_command("synthesize", "--output_dir", tmp_path / "again", *sizes)
    for file in quick.iterdir():
        assert file.read_bytes() == (tmp_path / "again" / file.name).read_bytes()
    run_command("synthesize", "--output_dir", tmp_path / "other", "--seed", 1, *sizes)
    assert load(tmp_path / "other" / "train.jsonl") != train


def test_synthesize_countdown(run_command, tmp_path):
    run_command(
        *("synthesize", "--task", "countdown", "--output_dir", tmp_path),
        *("--train_size", 30, "--test_size", 10, "--max_number", 30, "--operands", 2, 3),
    )
    rows = load(tmp_path / "train.jsonl") + load(tmp_path / "test.jsonl")
    assert len({(tuple(sorted(row["nums"])), row["target"]) for row in rows}) == 40
    assert {len(row["nums"]) for row in rows} == {2, 3}
    assert sorted(file.name for file in tmp_path.iterdir()) == ["test.jsonl", "train.jsonl"]


def test_the_tokenizer_knows_the_tasks_instruction(run_command, tmp_path):
    """It is in every prompt: spelt out letter by letter it would be most of its tokens."""
    sizes = ("--train_size", 200, "--test_size", 10, "--tokenizer_vocab_size", 512)
    run_command("synthesize", "--task", "countdown", "--output_dir", tmp_path, *sizes)
    instruction = countdown.COUNTDOWN.instruction
    assert len(Tokenizer.from_path(tmp_path).encode(instruction)) < len(instruction) / 2


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--train_size", 0], "--train_size 0: should be 1 or more"),
        (["--test_size", -1], "--test_size -1"),
        (["--two_step_share", 1.5], "--two_step_share 1.5"),
        (["--operations", "+%"], r"--operations \+%: should be some of"),
        (["--operands", 1], "--operands 1: each should be from 2 to 6"),
        (["--tokenizer_vocab_size", 5], "--tokenizer_vocab_size 5"),
        (["--max_number", 3], "--max_number 3"),
    ],
)
def test_synthesize_bad_flags(run_command, tmp_path, flags, message):
    with pytest.raises(UserError, match=message):
        run_command("synthesize", "--output_dir", tmp_path, *flags)
    assert list(tmp_path.iterdir()) == []


def test_synthesize_where_it_cannot_write(run_command, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        run_command("synthesize", "--output_dir", tmp_path / "file" / "below", "--train_size", 5, "--test_size", 5)


@pytest.mark.parametrize(
    ("tokenizer", "message"),
    [
        ([], "no tokenizer is given; use --vocab_path with --merges_file_path, or --tokenizer_path"),
        (["vocab_path"], "--vocab_path and --merges_file_path belong together; give both, or --tokenizer_path"),
        (["vocab_path", "tokenizer_path"], "give --vocab_path and --merges_file_path, or --tokenizer_path alone"),
    ],
)
def test_data_needs_one_tokenizer(quick, run_command, tmp_path, tokenizer, message):
    flags = [part for flag in tokenizer for part in (f"--{flag}", quick / "vocab.json")]
    with pytest.raises(UserError, match=message):
        run_command("data", "--file_path", quick / "train.jsonl", "--output_path", tmp_path / "a", *flags)


def test_data_bad_files(quick, run_command, tmp_path):
    (tmp_path / "file").write_text("")
    for source, output, message in (
        (tmp_path / "none.jsonl", tmp_path / "a", r"none\.jsonl: there is no such file"),
        (tmp_path / "file", tmp_path / "a", "file: holds no rows"),
        (quick / "train.jsonl", tmp_path / "file" / "a", "file: cannot be written"),
    ):
        with pytest.raises(UserError, match=message):
            run_command("data", "--tokenizer_path", quick, "--file_path", source, "--output_path", output)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["file", "quick"]


def test_script(quick, root, tmp_path):
    script = root / "examples" / "qwen_grpo_tutorial" / "rlhf_data.py"

    def run(source):
        pair = ("--vocab_path", quick / "vocab.json", "--merges_file_path", quick / "merges.txt")
        arguments = [*pair, "--file_path", source, "--output_path", tmp_path / "a.mindrecord"]
        command = [sys.executable, str(script), *map(str, arguments)]
        environment = os.environ | {"PYTHONPATH": str(root)}
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)

    assert run(quick / "train.jsonl").returncode == 0
    assert len(read_prompts(tmp_path / "a.mindrecord")) == 60
    failed = run(tmp_path / "none.jsonl")
    assert failed.returncode == 2
    assert failed.stderr.strip().count("\n") == 0
    assert "none.jsonl: there is no such file" in failed.stderr


def test_folders_as_source_and_output(quick, run_command, tmp_path):
    """The split `train` of a folder, or the one that is asked for, to a name inside of another folder."""
    run_command("data", "--tokenizer_path", quick, "--file_path", quick, "--output_path", f"{tmp_path / 'records'}/")
    assert len(read_prompts(tmp_path / "records" / "quick.mindrecord")) == 60
    run_command(
        *("data", "--tokenizer_path", quick, "--file_path", quick / "test.jsonl", "--output_path", tmp_path / "records")
    )
    assert len(read_prompts(tmp_path / "records" / "test.mindrecord")) == 20
    (tmp_path / "none").mkdir()
    with pytest.raises(UserError, match=r"none: has no split 'train' in parquet or JSONL files"):
        run_command("data", "--tokenizer_path", quick, "--file_path", tmp_path / "none", "--output_path", tmp_path)


def test_the_tutorial_s_rows_with_other_keys(quick, run_command, tmp_path):
    """`--fields` that names a ground truth needs no --dataset_type."""
    (tmp_path / "mine.jsonl").write_text('{"problem": "2 + 3?", "answer": "5"}\n')
    run_command(
        *("data", "--tokenizer_path", quick, "--file_path", tmp_path / "mine.jsonl"),
        *("--output_path", tmp_path / "mine.mindrecord", "--fields", "question=problem", "ground_truth=answer"),
    )
    assert read_prompts(tmp_path / "mine.mindrecord")[0].fields["ground_truth"] == "5"


def test_verls_file_is_known_by_its_columns(quick, run_command, tmp_path):
    run_command("data", "--file_path", quick / "test.jsonl", "--output_path", tmp_path / "test.parquet")
    output = tmp_path / "again.mindrecord"
    run_command("data", "--tokenizer_path", quick, "--file_path", tmp_path / "test.parquet", "--output_path", output)
    fields = read_prompts(output)[0].fields
    assert (fields["task"], fields["data_source"]) == ("verl", "arithmetic")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("import os; os._exit(3)", "its process ended with exit code 3"),
        ("raise KeyboardInterrupt", "its process died of signal 2"),
        ("import sys; sys.exit(5)", "SystemExit"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "its process died of signal 11"),
    ],
)
def test_a_file_of_tools_that_ends_its_process(quick, run_command, tmp_path, line, said):
    (tmp_path / "tools.py").write_text(f'{line}\ndef f(x: int) -> int:\n    """Give x."""\n    return x\n')
    with pytest.raises(UserError, match=said):
        run_command(
            *("data", "--tokenizer_path", quick, "--file_path", quick / "train.jsonl"),
            *("--output_path", tmp_path / "a.mindrecord", "--tools", f"{tmp_path}/tools.py:f"),
        )
