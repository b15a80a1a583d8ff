"""`mindrlhf data` as a command: exit codes for prompts beyond the limit, and for outputs; `tests/data` has the rest."""

import jobs
import pytest

from mindrlhf.data.mindrecord import read_prompts

LIMIT = 40  # tokens: about half of the problems are longer


def conversion(task, output, *arguments) -> list:
    files = ("--file_path", task.folder / "train.jsonl", "--output_path", output / "rollouts.mindrecord")
    kind = ("--tokenizer_path", task.folder, "--dataset_type", "arithmetic", "--template", "plain")
    return ["data", *files, *kind, *arguments]


def test_a_prompt_beyond_the_limit_is_an_error(task, output, refused):
    for mode in ((), ("--truncation", "error")):
        argv = conversion(task, output, "--max_prompt_length", LIMIT, *mode)
        refused(argv, task.folder / "train.jsonl", f"{LIMIT}", "--truncation")


@pytest.mark.parametrize("mode", ["left", "right", "drop"])
def test_a_prompt_beyond_the_limit_is_cut_or_dropped(task, tmp_path, mode):
    assert jobs.call(conversion(task, tmp_path, "--max_prompt_length", LIMIT, "--truncation", mode)) == 0
    whole = {prompt.id: prompt.token_ids.tolist() for prompt in read_prompts(task.folder / "train.mindrecord")}
    got = {prompt.id: prompt.token_ids.tolist() for prompt in read_prompts(tmp_path / "rollouts.mindrecord")}
    longer = {row for row, ids in whole.items() if len(ids) > LIMIT}
    assert 5 < len(longer) < 60
    cut = {"left": slice(-LIMIT, None), "right": slice(LIMIT)}
    if mode == "drop":
        assert got == {row: ids for row, ids in whole.items() if row not in longer}
    else:
        assert got == {row: ids[cut[mode]] if row in longer else ids for row, ids in whole.items()}


def test_nothing_left(task, output, refused):
    argv = conversion(task, output, "--max_prompt_length", 3, "--truncation", "drop")
    refused(argv, task.folder / "train.jsonl", "every row is too long", "raise --max_prompt_length")


def test_an_output_that_cannot_be_written(task, output, refused):
    argv = conversion(task, output, "--output_path", output / "metrics.jsonl" / "a.mindrecord")
    refused(argv, output / "metrics.jsonl", "cannot be written")
