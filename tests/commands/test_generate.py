"""`mindrlhf generate`: what it writes, that it draws what a training step draws, and what it refuses."""

import json
import re

import jobs
import numpy as np
import pytest

from mindrlhf.backend.process.launch import launch
from mindrlhf.configs.grpo import SamplingSettings
from mindrlhf.data.mindrecord import read_prompts
from mindrlhf.data.tokenizer import Tokenizer
from mindrlhf.files.printable import LAYOUT, printable
from mindrlhf.rollout.generator import Generator

TEXTS = ["Add 3 and 4.", "How much is twelve times two, and why?", "1", "Add 3 and 4."]
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Add 3 and 4."}]


def generation(model, prompts, output, *arguments) -> list:
    return ["generate", "--model", model, "--prompts", prompts, "--output", output, "max_new_tokens=10", *arguments]


def rows_of(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def answered(model, tmp_path_factory) -> tuple[list[dict], str]:
    """The rows of a run over texts and messages, and what it printed."""
    folder = tmp_path_factory.mktemp("generate")
    rows = [{"prompt": text, "answer": number} for number, text in enumerate(TEXTS)]
    rows += [{"messages": MESSAGES, "id": "mine"}, {"prompt": MESSAGES}]
    prompts, output = write_rows(folder / "prompts.jsonl", rows), folder / "new" / "out.jsonl"
    run = jobs.start(generation(model, prompts, output, "--num_generations", 3, "--seed", 5, "--log_probs", "top_k=40"))
    assert run.returncode == 0, run.stderr
    assert list(output.parent.iterdir()) == [output]
    return rows_of(output), run.stdout.splitlines()[-1]


def test_rows_come_back_in_order_with_their_responses(answered, model):
    rows, _ = answered
    tokenizer = Tokenizer.from_path(model)
    assert [row.get("prompt") for row in rows] == [*TEXTS, None, MESSAGES]
    assert [row.get("answer") for row in rows] == [0, 1, 2, 3, None, None]
    assert [row["id"] for row in rows] == [0, 1, 2, 3, "mine", 5]
    gains = []
    for row in rows:
        assert len(row["responses"]) == 3
        for response in row["responses"]:
            ids = response["token_ids"]
            assert response["tokens"] == len(ids) <= 10
            assert response["text"] == tokenizer.decode(ids, skip_special_tokens=True)
            assert response["finish_reason"] == ("length" if len(ids) == 10 and ids[-1] < 297 else "eos")
            assert len(response["log_probs"]) == len(response["behaviour_log_probs"]) == len(ids)
            gains.append(np.array(response["behaviour_log_probs"]) - response["log_probs"])
    assert np.concatenate(gains).min() > -1e-6  # of 40 tokens instead of 300, each is more probable
    assert np.concatenate(gains).max() > 1e-3
    # The same text twice is two prompts.
    assert rows[0]["responses"] != rows[3]["responses"]


def test_the_last_line_says_how_fast_it_was(answered):
    rows, line = answered
    tokens = sum(response["tokens"] for row in rows for response in row["responses"])
    assert re.search(rf"out.jsonl: 18 responses, {tokens} tokens in [\d.]+ s, [\d,]+ tokens/s \(prefill", line)


def test_python_gives_what_the_command_gives(answered, model):
    """Other slots, another order of arrival, one process more: the same responses; messages are ChatML."""
    tokenizer = Tokenizer.from_path(model)
    launch("CPU")
    generator = Generator(str(model), SamplingSettings(max_new_tokens=10, top_k=40), slots=2, seed=5)
    chat = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nAdd 3 and 4.<|im_end|>\n<|im_start|>assistant\n"
    for (row, group), text in zip(
        zip(answered[0], generator.generate([*TEXTS, chat, chat], 3), strict=True), [*TEXTS, chat, chat], strict=True
    ):
        assert tokenizer.decode(group.prompt.token_ids) == text
        assert [r["token_ids"] for r in row["responses"]] == [r.response_ids.tolist() for r in group.rollouts]
        assert [r["text"] for r in row["responses"]] == [generator.text(rollout) for rollout in group.rollouts]
    longer = generator.generate(["word " * 60], 1)  # than the cache that was made for the first
    assert len(longer[0].rollouts[0].response_ids) == generator.statistics.tokens


def test_a_training_step_s_responses_come_out_again(task, model, tmp_path):
    """Recorded by the trainer's own engine, in its first step; the same seed and step, weights and settings here."""
    run = jobs.Run(tmp_path)
    flags = {"load_sft_checkpoint_infer": model}
    settings = ("trainer.total_steps=1", "rollout.temperature=0.8", "seed=3", "algorithm.beta=0")
    assert jobs.call(task.train(tmp_path, *settings, **flags)) == 0
    output = tmp_path / "generated.jsonl"
    flags = ("--num_generations", 4, "--seed", 3, "--step", 1, "--log_probs", "temperature=0.8", "max_new_tokens=16")
    assert jobs.call(generation(model, task.folder / "train.mindrecord", output, *flags)) == 0
    generated = rows_of(output)
    prompts = read_prompts(task.folder / "train.mindrecord")
    assert [row["id"] for row in generated] == [prompt.id for prompt in prompts]
    assert [row["ground_truth"] for row in generated] == [prompt.fields["ground_truth"] for prompt in prompts]
    by_id = {row["id"]: row["responses"] for row in generated}
    recorded = [rollout for _, experiences in run.rollouts for e in experiences for rollout in e.group.rollouts]
    assert len(recorded) == 16
    for rollout in recorded:
        response = by_id[rollout.prompt_id][rollout.sample_index]
        assert response["token_ids"] == rollout.response_ids.tolist()
        assert response["finish_reason"] == rollout.finish_reason
        np.testing.assert_allclose(response["log_probs"], rollout.row("policy_log_probs"), rtol=0, atol=2e-5)


ENVIRONMENT = """
class Echo:
    def reset(self, word: str, number: str) -> str:
        self.answers = [word, number]
        return f" Say {word}."

    def reply(self, text: str) -> str | None:
        return self.answers.pop() if self.answers else None

    def get_reward(self) -> float:
        return 2.0 - len(self.answers)
"""


def test_conversations_with_an_environment(model, tmp_path, capsys):
    """The turns of both sides, and what the environment says of them."""
    (tmp_path / "echo.py").write_text(ENVIRONMENT)
    prompts = write_rows(tmp_path / "prompts.jsonl", [{"messages": MESSAGES, "word": "tree", "number": 17}])
    output = tmp_path / "out.jsonl"
    flags = ("--environment", f"{tmp_path}/echo.py:Echo", "--max_turns", 3, "--num_generations", 4, "--log_probs")
    settings = ("stop_strings=[e, a, '1']", "max_new_tokens=90", "temperature=3.0")
    assert jobs.call(generation(model, prompts, output, *flags, *settings)) == 0
    (row,) = rows_of(output)
    tokenizer = Tokenizer.from_path(model)
    assert row["word"] == "tree"
    said = []
    for response in row["responses"]:
        sampled, turns = np.array(response["sampled"]), response["turns"]
        assert "".join(text for _, text in turns) == tokenizer.decode(response["token_ids"])
        assert [drawn for drawn, _ in turns] == [number % 2 == 1 for number in range(len(turns))]
        assert turns[0][1].startswith(" Say tree.<|im_end|>")
        assert response["tokens"] == sampled.sum() < len(sampled)
        said.append([text for drawn, text in turns[1:] if not drawn])
        assert response["environment_reward"] == len(said[-1])
    assert max(map(len, said)) == 2
    assert all("\n17<|im_end|>" in texts[0] for texts in said if texts)
    assert "conversations: " in capsys.readouterr().out


def test_typed_prompts_are_questions_of_data(model, tmp_path, capsys):
    """To the terminal and to a file the same; a template and a system prompt as `mindrlhf data` has them."""
    texts = [part for text in TEXTS[:2] for part in ("--prompt", text)]
    flags = ("--template", "plain", "--system_prompt", "Be brief.", "--num_generations", 2, "max_new_tokens=10")
    command = ["generate", "--model", model, *texts, *flags]
    output, prompts = tmp_path / "typed.jsonl", tmp_path / "prompts.jsonl"
    assert jobs.call(command) == 0
    shown, _ = capsys.readouterr()
    assert jobs.call([*command, "--output", output]) == 0
    write_rows(prompts, [{"prompt": f"Be brief.\n\n{text}\n"} for text in TEXTS[:2]])
    again = tmp_path / "again.jsonl"
    assert jobs.call(generation(model, prompts, again, "--num_generations", 2)) == 0
    rows = rows_of(output)
    assert [row["prompt"] for row in rows] == TEXTS[:2]
    assert [row["responses"] for row in rows] == [row["responses"] for row in rows_of(again)]
    lines = []
    for number, row in enumerate(rows, 1):
        lines.append(f"--- prompt {number} of 2: {row['prompt']}")
        for index, response in enumerate(row["responses"], 1):
            lines += [f"--- response {index} of 2", printable(response["text"], keep=LAYOUT)]
    assert shown == "\n".join(lines) + "\n"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--prompts", "a.jsonl"), "--output is missing"),
        (("--prompts", "a.jsonl", "--output", "b.jsonl", "--template", "plain"), "--template and --system_prompt are"),
        (("--prompt", "a", "--log_probs"), "--log_probs are written to --output"),
        (("--prompt", "a", "--template", "nothing"), "--template nothing: neither one of"),
    ],
)
def test_typed_prompts_that_are_refused(model, refused, arguments, text):
    refused(["generate", "--model", model, *arguments], text)


@pytest.mark.parametrize(
    ("row", "text"),
    [
        ({"text": "3 + 4"}, "line 2: not a fields row: key 'question' is missing (found: 'text')"),
        ({"prompt": ""}, "line 2: not a fields row: key 'prompt' should be text, and is ''"),
        ({"prompt": 7}, "line 2: not a fields row: key 'prompt' should be a list of messages"),
        ({"messages": []}, "line 2: not a fields row: key 'messages' should be a list of messages"),
        (
            {"messages": [{"role": "user"}]},
            "key 'messages': message 0 should be an object with the texts role and content",
        ),
        ({"prompt": "word " * 2000}, "with max_new_tokens 10 are longer than the model's 2048 positions"),
    ],
)
def test_rows_that_are_refused(model, output, refused, tmp_path, row, text):
    prompts = write_rows(tmp_path / "prompts.jsonl", [{"prompt": "fine"}, row])
    refused(generation(model, prompts, output / "answers.jsonl"), prompts, text)


@pytest.mark.parametrize(
    ("arguments", "texts"),
    [
        (("temprature=1",), ("unknown key temprature", "temperature")),
        (("top_p=2",), ("top_p", "2")),
        (("min_new_tokens=11",), ("min_new_tokens is 11", "max_new_tokens 10")),
        (("temperature=0", "--num_generations", 2), ("--num_generations 2", "temperature above 0")),
        (("--num_generations", 0), ("--num_generations 0: should be 1 or more",)),
        (("--tools", "calculater"), ("tool 'calculater' is not known", "calculator")),
        (("--seed", -1), ("--seed -1: should be 0 or more",)),
        (("--slots", 0), ("--slots 0: should be 1 or more",)),
        (("--limit", 0), ("--limit 0: should be 1 or more",)),
        (("--model", "none"), ("none: no such checkpoint",)),
        (("--prompts", "none.jsonl"), ("none.jsonl: there is no such file",)),
        (("--prompts", "none.mindrecord"), ("none.mindrecord: no such MindRecord file",)),
        (("--vocab_path", "vocab.json"), ("--vocab_path and --merges_file_path belong together",)),
    ],
)
def test_arguments_that_are_refused(task, model, output, refused, arguments, texts):
    refused(generation(model, task.folder / "test.mindrecord", output / "answers.jsonl", *arguments), *texts)


def test_outputs_that_are_refused(task, model, output, refused, tmp_path):
    prompts = task.folder / "test.mindrecord"
    refused(generation(model, prompts, output / "ckpt"), "is a folder")
    refused(generation(model, prompts, output / "metrics.jsonl" / "out.jsonl"), "cannot create the folder")
    refused(generation(task.folder, prompts, output / "answers.jsonl"), "has no config.json")
