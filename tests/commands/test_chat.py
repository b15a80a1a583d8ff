"""`mindrlhf chat`: as a process on a terminal and on a pipe, and in this process with what the model is given."""

import io
import os
import pty
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import jobs
import numpy as np
import pytest
from slow_cases import few_of

from mindrlhf.data.templates import PLAIN_TURNS
from mindrlhf.data.tokenizer import Tokenizer
from mindrlhf.data.turns import TurnTemplate
from mindrlhf.files.printable import LAYOUT, printable
from mindrlhf.rollout.engine import Engine
from mindrlhf.rollout.user import Conversation, ConversationWriter, User

HELLO, MORE = "Add 3 and 4.", "And now 12 of them?"


def chat(model, *arguments) -> list[str]:
    settings = ("max_new_tokens=6", "temperature=3")  # random weights nearly always draw one token
    return ["chat", "--model", str(model), *settings, "--seed", "5", *arguments]


@pytest.fixture
def conversations(monkeypatch):
    """The response of every conversation that an engine has had, with the whole prompt's first token."""
    made, generate = [], Engine.generate

    def kept(*arguments, **named):
        groups = generate(*arguments, **named)
        made.extend((group.prompt.token_ids, group.rollouts[0]) for group in groups)
        return groups

    monkeypatch.setattr(Engine, "generate", kept)
    return made


@pytest.fixture
def talk(monkeypatch, capsys):
    """talk(argv, line, ...): (standard output, standard error) of a chat with these lines on standard input."""

    def of(argv, *lines) -> tuple[str, str]:
        monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        capsys.readouterr()
        assert jobs.call(argv) == 0
        return capsys.readouterr()

    return of


def turn(text: str) -> str:
    return f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"


def test_several_turns_are_one_conversation_of_ids(model, talk, conversations):
    out, err = talk(chat(model), HELLO, "", MORE, "/clear", "/help", HELLO, "/exit", "never read")
    (prompt, first), (_, second) = conversations
    tokenizer = Tokenizer.from_path(model)
    ids = first.response_ids.tolist()
    begins = [at for at in range(1, len(ids)) if first.sampled[at] > first.sampled[at - 1]]
    assert first.sampled.sum() == 12
    assert len(begins) == 2
    answers = [tokenizer.decode(ids[at : at + 6]) for at in begins]
    whole = tokenizer.decode([*prompt, *ids])
    assert whole.endswith(f"{turn(HELLO)}{answers[0]}<|im_end|>\n{turn(MORE)}{answers[1]}"), "a cut answer gets its end"
    again = second.response_ids.tolist()
    assert again[: begins[0]] == ids[: begins[0]], "the same message, and nothing before it"
    assert again[-6:] != ids[begins[0] : begins[0] + 6], "another draw"
    answers.append(tokenizer.decode(again[-6:]))
    assert out == "".join(printable(answer, keep=LAYOUT) + "\n" for answer in answers)
    assert "(a new conversation)" in err
    assert "/clear begins a new conversation" in err


def test_generate_answers_a_typed_prompt_as_chat_does(model, talk, capsys):
    same = (*chat(model, "temperature=0", "--system_prompt", "Be brief.")[1:],)
    out, _ = talk(["chat", *same], HELLO)
    assert jobs.call(["generate", *same, "--prompt", HELLO]) == 0
    answer, stated = capsys.readouterr()
    assert answer == out != "\n"
    assert "1 responses, 6 tokens" in stated


def test_a_conversation_without_room_for_a_message_begins_anew_with_it(model, talk, conversations):
    argv = chat(model, "--context", "125", "--system_prompt", "")
    _, err = talk(argv, HELLO, "word " * 20, MORE, "word " * 90)  # 27, 98, 34 and 378 tokens
    tokenizer = Tokenizer.from_path(model)
    texts = [tokenizer.decode([*prompt, *response.response_ids]) for prompt, response in conversations]
    asked = (HELLO, ("word " * 20).strip(), MORE)
    assert all(text.startswith(turn(said)) for text, said in zip(texts, asked, strict=True))
    assert err.count("the conversation had room for 124 tokens; a new one begins") == 3
    assert err.count("the message is too long: a conversation has room for 124 tokens") == 1


def test_it_says_what_a_model_without_a_chat_format_needs(model, talk, conversations):
    """And control tokens that are typed stay text, in the first message and in later ones."""
    _, err = talk(chat(model), "Say <|im_end|>.", "Say <|im_end|>.")
    assert "no chat template: messages are written in the markup 'qwen'; --template plain writes bare texts" in err
    tokenizer = Tokenizer.from_path(model)
    ((prompt, response),) = conversations
    said = tokenizer.decode([*prompt, *response.response_ids[~response.sampled]])
    assert said.count("Say < |im_end|>.<|im_end|>") == 2
    _, err = talk(chat(model, "--template", "plain"), "Hi")
    assert "no chat template" not in err


@pytest.mark.parametrize(
    ("arguments", "texts"),
    [
        (("--model", "none"), ("none: no such checkpoint",)),
        (("--context", "1"), ("--context 1: should be 2 or more",)),
        (("--template", "none.jinja"), ("none.jinja: there is no such file",)),
        (("temprature=1",), ("unknown key temprature", "temperature")),
    ],
)
def test_arguments_that_are_refused(model, refused, arguments, texts):
    refused(chat(model, *arguments), *texts)


class Screen:
    """A terminal that keeps what is written to it."""

    def __init__(self, most: int = 10**6):
        self.parts, self.most, self.closed = [], most, False

    @property
    def interrupted(self) -> bool:
        return len(self.parts) >= self.most

    def write(self, text: str) -> None:
        self.parts.append(text)


@pytest.fixture(scope="module")
def bytewise(model):
    """A tokenizer in which each of these characters is several tokens."""
    tokenizer = Tokenizer.from_path(model)
    text = "naïve 数学 \U0001f469\u200d\U0001f52c ok"
    assert len(tokenizer.encode(text)) > len(text)
    return tokenizer, text


def reading(screen, tokenizer):
    """A user of a conversation without a message yet."""
    writer = ConversationWriter(TurnTemplate(tokenizer, PLAIN_TURNS), ())
    return User(screen, writer, Conversation(np.zeros(1, np.int32), (), 1), 99, tokenizer.decode, 99)


def test_characters_of_several_tokens_are_shown_once_they_are_whole(bytewise):
    tokenizer, text = bytewise
    ids, screen = tokenizer.encode(text), Screen()
    user = reading(screen, tokenizer)
    for count in range(1, len(ids) + 1):
        assert not user.read(0, ids[:count])
        assert text.startswith("".join(screen.parts))
    user.submit(0, ids, len(ids))
    assert "".join(screen.parts) == text + "\n"
    assert screen.parts.count("") > 4, "waited for the rest of characters"


def test_half_a_character_at_the_end_of_an_answer_is_not_lost(bytewise):
    tokenizer, _ = bytewise
    ids, screen = tokenizer.encode("数")[:-1], Screen()
    user = reading(screen, tokenizer)
    user.read(0, ids)
    assert "".join(screen.parts) == ""
    user.submit(0, ids, len(ids))
    assert "".join(screen.parts) == "\N{REPLACEMENT CHARACTER}\n"


@pytest.mark.parametrize("ending", few_of([b"\x03"], [b"\x04", b"/exit\n"]), ids=["Ctrl-C", "Ctrl-D", "exit"])
def test_a_terminal(model, ending):
    """Ctrl-C ends an answer whose first letters are there; at the prompt, it and the others end the program."""
    keys, screen = pty.openpty()
    command = [sys.executable, "-m", "mindrlhf", *chat(model, "max_new_tokens=1400")]
    environment = os.environ | {"PYTHONPATH": str(jobs.ROOT), "OMP_NUM_THREADS": "2", "TERM": "dumb"}
    pipes = {"stdin": screen, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with (
        subprocess.Popen(command, **pipes, env=environment, start_new_session=True) as process,
        ExitStack() as stack,
    ):
        stack.callback(process.kill)
        os.write(keys, f"{HELLO}\n".encode())
        first = process.stdout.read(len("> ") + 4)
        process.send_signal(signal.SIGINT)
        rest = b""
        while b"\n> " not in rest:
            letter = process.stdout.read(1)
            assert letter, process.stderr.read()
            rest += letter
        if ending == b"\x03":
            while Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] != "S":
                pass  # it is about to read
            process.send_signal(signal.SIGINT)
        else:
            os.write(keys, ending)
        out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert first.startswith(b"> ")
    assert 1 < len(rest) < 10_000
    assert out == (b"" if ending.startswith(b"/") else b"\n")
    assert b"Traceback" not in err
