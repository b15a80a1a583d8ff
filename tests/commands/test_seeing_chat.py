"""`mindrlhf chat` with images: commands of the terminal, ids of conversations, and the answers of `generate`."""

import io
import json
import sys

import jobs
import numpy as np
import pytest
from seeing_task import make_seeing_task

from mindrlhf.backend import default_device
from mindrlhf.backend.process.launch import launch
from mindrlhf.checkpoint.hf import read_hf_config
from mindrlhf.commands.chat import StandardStreams
from mindrlhf.configs.grpo import SamplingSettings
from mindrlhf.data.tokenizer import Tokenizer
from mindrlhf.errors import UserError
from mindrlhf.images.processor import ImageProcessor
from mindrlhf.rollout.engine import Engine
from mindrlhf.rollout.generator import Generator
from mindrlhf.rollout.user import ConversationWriter, TypedMessage
from mindrlhf.run.picture_prompts import PicturePrompts
from mindrlhf.run.picture_rows import PictureTemplate
from mindrlhf.run.stop_signals import Interrupts
from mindrlhf.types import Prompt

IMAGE = {"type": "image"}


@pytest.fixture(scope="module")
def seeing(tmp_path_factory):
    return make_seeing_task(tmp_path_factory.mktemp("seeing"), depth=1, layers=1)


@pytest.fixture(scope="module")
def vision(seeing):
    return read_hf_config(seeing.model, seeing=True).vision


@pytest.fixture(scope="module")
def tokenizer(seeing):
    return Tokenizer.from_path(seeing.model)


@pytest.fixture(scope="module")
def files(seeing):
    return sorted((seeing.rows.parent / "images").iterdir())


@pytest.fixture
def terminal(monkeypatch, vision):
    """terminal(line, ...): streams with these lines typed."""

    def of(*lines):
        monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        made = StandardStreams(interrupts)
        made.show = lambda file: ImageProcessor(vision.images).read(file, "", "/image")
        return made

    with Interrupts() as interrupts:
        yield of


def test_images_wait_for_the_next_message(terminal, files, tmp_path, capfd):
    (tmp_path / "broken.png").write_bytes(b"\x89PNG")
    first, second, *_ = files
    lines = [f"/image {first}", "/image absent.png", f"/image {tmp_path}/broken.png", "/image", f"/image {second}"]
    streams = terminal(*lines, "<image>?", "<image> or <image>?", "Which?", f"/image {first}", "/clear", "And?")
    typed = streams.ask()
    assert typed.content == [IMAGE, {"type": "text", "text": " or "}, IMAGE, {"type": "text", "text": "?"}]
    assert [picture.tokens for picture in typed.pictures] == [4, 4]
    assert typed.pictures[0].digest != typed.pictures[1].digest
    later = streams.ask()
    assert (later.content, later.pictures) == ("Which?", ())
    assert streams.ask() is None
    assert streams.ask().pictures == ()
    notes = capfd.readouterr().err.splitlines()
    assert notes[0] == "(16 x 16 pixels as the model sees it, 4 tokens; the next message shows it)"
    assert notes[1].startswith("(/image: there is no image file absent.png; paths are relative to")
    assert notes[2].startswith(f"(/image: {tmp_path}/broken.png: the bytes are no image; give a file of PNG")
    assert notes[3].startswith("(/clear begins a new conversation")
    assert notes[4].endswith("the next message shows 2 images)")
    assert notes[5] == "(the message has 1 of <image>, and 2 images; write one for each, or none)"


def test_a_first_message_is_generate_s_prompt(seeing, tokenizer, vision, files):
    read = ImageProcessor(vision.images).read
    pictures = tuple(read(file, "", "image") for file in files[:2])
    writer = ConversationWriter(PictureTemplate(tokenizer), (), vision)
    talk = writer.first(TypedMessage([IMAGE, IMAGE, {"type": "text", "text": "Which?"}], pictures))
    (prompt,) = PicturePrompts(tokenizer, vision, "--prompt").of_texts(["Which?"], [str(file) for file in files[:2]])
    assert talk.ids.tolist() == prompt.token_ids.tolist()
    assert [one.digest for one in talk.pictures] == [one.digest for one in prompt.pictures]
    assert tokenizer.decode(talk.ids[: talk.prefilled]).endswith("<|image_pad|><|vision_end|>")
    assert "<|image_pad|>" not in tokenizer.decode(talk.ids[talk.prefilled :])


def test_typed_control_tokens_are_no_images(tokenizer, vision, files):
    picture = ImageProcessor(vision.images).read(files[0], "", "image")
    writer = ConversationWriter(PictureTemplate(tokenizer), (), vision)
    spelt = "A <|image_pad|>?"
    talk = writer.first(TypedMessage(spelt))
    assert (talk.prefilled, (talk.ids == vision.image_token_id).sum()) == (1, 0)
    ids = writer.next(TypedMessage([IMAGE, {"type": "text", "text": spelt}], (picture,)), [])
    assert (ids == vision.image_token_id).sum() == 4
    assert "A < |image_pad|>?" in tokenizer.decode(ids)


def test_a_template_without_places_for_images_is_named(tokenizer, vision, files):
    picture = ImageProcessor(vision.images).read(files[0], "", "image")
    plain = "{% for m in messages %}{{ m.role }}: {{ m.content }}<|im_end|>\n{% endfor %}"
    writer = ConversationWriter(PictureTemplate(tokenizer, plain), (), vision)
    with pytest.raises(ValueError, match="the chat template writes 0 image tokens for 1 image"):
        writer.first(TypedMessage([IMAGE, {"type": "text", "text": "Which?"}], (picture,)))


def chat(model, *arguments):
    return ["chat", "--model", model, "max_new_tokens=6", "temperature=0", *arguments]


@pytest.mark.parametrize(
    ("file", "message"),
    [("absent.png", "--image: there is no image file absent.png"), ("{model}/config.json", "the bytes are no image")],
)
def test_a_bad_file_at_the_start_is_one_sentence(seeing, capfd, file, message):
    assert jobs.call(chat(seeing.model, "--image", file.format(model=seeing.model))) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert message in line


def test_a_text_model_refuses_images(model, files, capfd, terminal):
    assert jobs.call(chat(model, "--image", files[0])) == 2
    assert "is a model of the family qwen2, which takes text alone" in capfd.readouterr().err
    streams = terminal(f"/image {files[0]}", "Hello")

    def refuses(file):
        raise UserError("/image: it takes text alone.")

    streams.show = refuses
    assert streams.ask().pictures == ()
    assert "(/image: it takes text alone)" in capfd.readouterr().err


@pytest.fixture
def talk(monkeypatch, capsys):
    """talk(argv, line, ...): standard output and error of a chat, and each prompt with its rollout."""

    def of(argv, *lines):
        made, generate = [], Engine.generate

        def kept(*arguments, **named):
            groups = generate(*arguments, **named)
            made.extend((group.prompt, group.rollouts[0]) for group in groups)
            return groups

        monkeypatch.setattr(Engine, "generate", kept)
        monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        capsys.readouterr()
        assert jobs.call(argv) == 0
        monkeypatch.setattr(Engine, "generate", generate)
        return capsys.readouterr(), made

    return of


@pytest.mark.slow
def test_an_answer_is_that_of_generate(seeing, files, talk, tmp_path):
    found = []
    for file in (files[0], files[-1]):
        (out, _), ((_, rollout),) = talk(chat(seeing.model, "--image", file), "Which colour?")
        argv = ["generate", "--model", seeing.model, "--prompt", "Which colour?", "--image", file]
        argv += ["--output", tmp_path / "out.jsonl", "--log_probs", "max_new_tokens=6", "temperature=0"]
        assert jobs.call(argv) == 0
        (answer,) = json.loads((tmp_path / "out.jsonl").read_text())["responses"]
        assert rollout.response_ids[rollout.sampled].tolist() == answer["token_ids"]
        np.testing.assert_allclose(
            rollout.row("policy_log_probs")[rollout.sampled], answer["log_probs"], rtol=0, atol=2e-5
        )
        found.append(answer["log_probs"])
        assert out.endswith("\n")
    assert not np.allclose(*found, atol=1e-4)


@pytest.mark.slow
def test_later_turns_keep_earlier_images(seeing, files, talk):
    """Text behind an image, then another image; each answer is drawn as behind one prompt of the whole conversation."""
    lines = (f"/image {files[0]}", "Which colour?", "Sure?", "/image absent.png", f"/image {files[-1]}", "And this?")
    (_, err), made = talk(chat(seeing.model), *lines, "Sure?", "/clear", "Hello")
    (first, said), (second, _), (alone, _) = made
    assert "no image file" in err
    assert "a new one begins" not in err
    before = [*first.token_ids, *said.response_ids]
    assert second.token_ids[: len(before)].tolist() == before
    assert [one.digest for one in second.pictures][:1] == [one.digest for one in first.pictures]
    assert (len(second.pictures), len(alone.pictures)) == (2, 0)
    launch(default_device())
    generator = Generator(str(seeing.model), SamplingSettings(max_new_tokens=6, temperature=0.0))
    turns = 0
    for prompt, rollout in made:
        begins = np.flatnonzero(np.diff(rollout.sampled.astype(int), prepend=0) == 1)
        for begin in begins:
            ids = np.concatenate((prompt.token_ids, rollout.response_ids[:begin]))
            ((again,),) = (group.rollouts for group in generator.generate([Prompt(0, ids, pictures=prompt.pictures)]))
            end = begin + len(again.response_ids)
            assert again.response_ids.tolist() == rollout.response_ids[begin:end].tolist()
            ours, theirs = rollout.row("policy_log_probs")[begin:end], again.row("policy_log_probs")
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=2e-5)
            turns += 1
    assert turns == 5


@pytest.mark.slow
def test_a_message_without_room_begins_anew_with_its_image(seeing, tokenizer, vision, files, talk):
    writer = ConversationWriter(PictureTemplate(tokenizer), (), vision)
    picture = ImageProcessor(vision.images).read(files[0], "", "image")
    size = len(writer.first(TypedMessage([IMAGE, {"type": "text", "text": "Which colour?"}], (picture,))).ids)
    lines = (f"/image {files[0]}", "Which colour?", f"/image {files[-1]}", "Which colour?")
    (_, err), made = talk(chat(seeing.model, "--context", size + 12), *lines)  # one message, an answer and no more
    assert f"the conversation had room for {size + 11} tokens; a new one begins" in err
    assert [len(prompt.pictures) for prompt, _ in made] == [1, 1]
    assert made[0][0].pictures[0].digest != made[1][0].pictures[0].digest
