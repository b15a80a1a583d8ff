"""`mindrlhf chat`: conversations with a model, in the terminal or through a pipe."""

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from mindrlhf.commands.model_flags import PLAIN, add_message_flags, add_model_flags
from mindrlhf.run.stop_signals import Interrupts

if TYPE_CHECKING:
    from mindrlhf.configs.model import ModelConfig
    from mindrlhf.data.tokenizer import Tokenizer
    from mindrlhf.data.turns import Message, TurnTemplate
    from mindrlhf.images.processor import Picture
    from mindrlhf.rollout.user import TypedMessage

HELP = "/clear begins a new conversation, /exit or Ctrl-D ends the program, Ctrl-C ends an answer"
ATTACH = "/image"
SEEING_HELP = f"{ATTACH} FILE shows an image with the next message, {HELP}"
DEFAULTS = {"temperature": 0.7}
CONTEXT = 4096


class StandardStreams:
    """Standard input and output as the terminal of conversations (`rollout.user.Terminal`).

    show: reads an image file, and raises UserError for one that cannot be shown. help: names the commands. Messages get
    the images that were read since the last one.
    """

    def __init__(self, interrupts: Interrupts):
        self._interrupts = interrupts
        self.closed = False
        self.help = HELP
        self.show: Callable[[str], Picture] | None = None
        self.pictures: list[Picture] = []

    @property
    def interrupted(self) -> bool:
        return self._interrupts.received is not None

    def ask(self) -> "TypedMessage | None":
        """Read lines up to the next message; None for /clear and at the end."""
        while not self.closed:
            text = self._line()
            if text in (None, "/exit", "/quit"):
                self.closed = True
            elif text == "/clear":
                self.pictures.clear()
                self.note("a new conversation")
                return None
            elif text.partition(" ")[0] == ATTACH:
                self._attach(text.removeprefix(ATTACH).strip())
            elif re.fullmatch(r"/[a-z?]*", text):
                self.note(self.help)
            elif text and (typed := self._typed(text)):
                self._interrupts.hold()
                return typed
        return None

    def _attach(self, name: str) -> None:
        """Read an image for the next message; a note says what came of it."""
        from mindrlhf.errors import UserError

        if not name:
            self.note(self.help)
            return
        try:
            picture = self.show(name)
        except UserError as error:
            self.note(f"{error}".removesuffix("."))
            return
        self.pictures.append(picture)
        height, width = picture.pixels.shape[:2]
        count = len(self.pictures)
        size = f"{width} x {height} pixels as the model sees it, {picture.tokens} tokens"
        self.note(f"{size}; the next message shows {'it' if count == 1 else f'{count} images'}")

    def _typed(self, text: str) -> "TypedMessage | None":
        """Place the images in a message.

        None, with a note, if its marks are fewer or more.
        """
        from mindrlhf.data.pictures import MARK, with_images
        from mindrlhf.rollout.user import TypedMessage

        marks = text.count(MARK)
        count = len(self.pictures)
        if count and marks not in (0, count):
            self.note(f"the message has {marks} of {MARK}, and {count} images; write one for each, or none")
            return None
        (message,), _ = with_images([{"role": "user", "content": text}], self.pictures)
        typed = TypedMessage(message["content"], tuple(self.pictures))
        self.pictures.clear()
        return typed

    def write(self, text: str) -> None:
        print(text, end="", flush=True)

    def note(self, text: str) -> None:
        print(f"({text})", file=sys.stderr, flush=True)

    def _line(self) -> str | None:
        """Read a line; None at the end."""
        typed = sys.stdin.isatty()
        try:
            with self._interrupts.raised():
                line = input("> ") if typed else sys.stdin.readline() or None
        except (EOFError, KeyboardInterrupt):
            self.write("\n")
            line = None
        return line and line.strip()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    temperature = DEFAULTS["temperature"]
    drawn = f"how tokens are drawn, as in `generate`: temperature (default {temperature}), max_new_tokens of an answer"
    add("overrides", nargs="*", metavar="key=value", help=f"{drawn}, ...")
    add_model_flags(parser)
    add_message_flags(parser, f"{PLAIN} (bare texts), or a chat template in jinja2 as on the Hugging Face hub")
    shown = f"image file that the first message shows; repeatable, and {ATTACH} FILE shows one later"
    add("--image", action="append", default=[], metavar="FILE", help=shown)
    add("--context", type=int, default=CONTEXT, help=f"most tokens of a conversation (default {CONTEXT})")
    parser.set_defaults(num_generations=1, slots=1)


def run(args: argparse.Namespace) -> None:
    """Answer messages until there are no more."""
    with Interrupts() as interrupts:
        _chat(args, StandardStreams(interrupts))


def _chat(args: argparse.Namespace, terminal: StandardStreams) -> None:
    # These import NumPy, whose threads must not take Ctrl-C.
    from mindrlhf.backend.process.launch import launch
    from mindrlhf.checkpoint.local import local_models
    from mindrlhf.checkpoint.tokenizer import open_tokenizer
    from mindrlhf.commands.generation import check_generation, open_generator
    from mindrlhf.configs.grpo import SamplingSettings
    from mindrlhf.configs.loading import load_settings
    from mindrlhf.metrics.progress import CompileLines
    from mindrlhf.rollout.generator import language_model
    from mindrlhf.rollout.user import ConversationWriter, converse

    sampling = load_settings(SamplingSettings, overrides=args.overrides, defaults=DEFAULTS)
    check_generation(args, sampling)
    args = local_models(args)
    model = language_model(args.model, seeing=True)
    terminal.show = partial(_read_image, model, args.model)
    terminal.help = SEEING_HELP if model.vision else HELP
    terminal.pictures += [terminal.show(file, "--image") for file in args.image]
    room = min(args.context, model.max_position_embeddings) - 1
    tokenizer = open_tokenizer(args, args.model)
    template, opening = _open_turns(args, tokenizer, model, terminal.note)
    conversation = sampling.model_copy(update={"max_new_tokens": room})
    generator = open_generator(args, args.model, conversation, tokenizer, "the conversation")
    with launch(args.device_target, worker_count=1, layout_source="mindrlhf chat"):
        from mindrlhf.backend.compile.graph import announced

        if sys.stdin.isatty():
            import readline  # lets `input` edit its line

            readline.parse_and_bind("set enable-bracketed-paste on")  # several pasted lines are one message
            terminal.note(terminal.help)
        with announced(CompileLines(stream=sys.stderr)):
            writer = ConversationWriter(template, opening, model.vision)
            converse(terminal, generator, writer, sampling.max_new_tokens)


def _read_image(model: "ModelConfig", checkpoint: str, file: str, where: str = ATTACH) -> "Picture":
    """Read an image file as the model sees it. Raises UserError."""
    from mindrlhf.configs.vision_checks import check_shown
    from mindrlhf.images.processor import ImageProcessor

    check_shown(model, checkpoint, where)
    return ImageProcessor(model.vision.images).read(Path(file).expanduser(), Path(), where)


def _open_turns(
    args: argparse.Namespace, tokenizer: "Tokenizer", model: "ModelConfig", note: Callable[[str], None]
) -> tuple["TurnTemplate", Sequence["Message"]]:
    """Open the template of typed messages; returns it with the messages before the first.

    note: shows a remark to the user.
    """
    from mindrlhf.data.chat import family_chat, with_variables
    from mindrlhf.data.templates import PLAIN_TURNS
    from mindrlhf.data.turns import TurnTemplate
    from mindrlhf.errors import UserError
    from mindrlhf.files.text import read_text
    from mindrlhf.run.picture_rows import PictureTemplate

    tokenizer, _ = with_variables(tokenizer, args.chat_template_kwargs)
    name = args.template
    system = args.system_prompt
    chat = family_chat(tokenizer)
    if name is None and tokenizer.chat_template is None:
        needs = f"--template {PLAIN} writes bare texts, for a model that was trained on them"
        if chat is None:
            raise UserError(f"{args.model}: has no chat template; {needs}, or give a file with a chat template.")
        note(f"the tokenizer has no chat template: messages are written in the markup {chat.name!r}; {needs}")
        system = chat.system if system is None else system
    begin = "".join(map(tokenizer.id_to_token, tokenizer.begin_ids))
    template = begin + PLAIN_TURNS if name == PLAIN else name and read_text(name, "a chat template")
    opening = [{"role": "system", "content": system}] if system else []
    kind = PictureTemplate if model.vision else TurnTemplate
    return kind(tokenizer, template, variables=args.chat_template_kwargs), opening
