"""Games as source rows: `mindrlhf synthesize`, then `mindrlhf data`."""

import json

import pytest

from mindrlhf.data.mindrecord import read_prompts
from mindrlhf.environments.ready.games import GAMES


@pytest.mark.parametrize("game", GAMES)
def test_synthesize_a_game(run_command, tmp_path, game):
    """Rows begin the games that their seeds begin, and need no flag of `data`."""
    run_command(
        *("synthesize", "--task", game, "--output_dir", tmp_path, "--train_size", 9, "--test_size", 3),
        *("--tokenizer_vocab_size", 400),
    )
    texts = [(tmp_path / name).read_text().splitlines() for name in ("train.jsonl", "test.jsonl")]
    rows = [json.loads(line) for lines in texts for line in lines]
    assert len({row["seed"] for row in rows}) == 12
    for row in rows:
        assert GAMES[game]().reset(**row) is None
        assert row["environment"] == game
        assert GAMES[game]().reset(seed=row["seed"]) == row["question"]
    output, file = tmp_path / "a.mindrecord", tmp_path / "train.jsonl"
    run_command("data", "--tokenizer_path", tmp_path, "--file_path", file, "--output_path", output)
    assert {**read_prompts(output)[0].fields} == {"task": "game", **rows[0]}
