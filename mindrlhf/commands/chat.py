"""`mindrlhf chat`: conversations with a model, in the terminal or through a pipe."""

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from mindrlhf.commands.model_flags import PLAIN, add_message_flags, add_model_flags
from mindrlhf.run.stop_signals import Interrupts

if TYPE_CHECKING:
    from mindrlhf.data.tokenizer import Tokenizer
    from mindrlhf.data.turns import Message, TurnTemplate

HELP = "/clear begins a new conversation, /exit or Ctrl-D ends the program, Ctrl-C ends an answer"
DEFAULTS = {"temperature": 0.7}
CONTEXT = 4096


class StandardStreams:
    """Standard input and output as the terminal of conversations (`rollout.user.Terminal`)."""

    def __init__(self, interrupts: Interrupts):
        self._interrupts = interrupts
        self.closed = False

    @property
    def interrupted(self) -> bool:
        return self._interrupts.received is not None

    def ask(self) -> str | None:
        """Read lines up to the next message; None for /clear and at the end."""
        while not self.closed:
            text = self._line()
            if text in (None, "/exit", "/quit"):
                self.closed = True
            elif text == "/clear":
                self.note("a new conversation")
                return None
            elif re.fullmatch(r"/[a-z?]*", text):
                self.note(HELP)
            elif text:
                self._interrupts.hold()
                return text
        return None

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
    from mindrlhf.rollout.user import converse

    sampling = load_settings(SamplingSettings, overrides=args.overrides, defaults=DEFAULTS)
    check_generation(args, sampling)
    args = local_models(args)
    room = min(args.context, language_model(args.model).max_position_embeddings) - 1
    tokenizer = open_tokenizer(args, args.model)
    template, opening = _open_turns(args, tokenizer, terminal.note)
    conversation = sampling.model_copy(update={"max_new_tokens": room})
    generator = open_generator(args, args.model, conversation, tokenizer, "the conversation")
    with launch(args.device_target, worker_count=1, layout_source="mindrlhf chat"):
        from mindrlhf.backend.compile.graph import announced

        if sys.stdin.isatty():
            import readline  # lets `input` edit its line

            readline.parse_and_bind("set enable-bracketed-paste on")  # several pasted lines are one message
            terminal.note(HELP)
        with announced(CompileLines(stream=sys.stderr)):
            converse(terminal, generator, template, opening, sampling.max_new_tokens)


def _open_turns(
    args: argparse.Namespace, tokenizer: "Tokenizer", note: Callable[[str], None]
) -> tuple["TurnTemplate", Sequence["Message"]]:
    """Open the template of typed messages; returns it with the messages before the first.

    note: shows a remark to the user.
    """
    from mindrlhf.data.chat import family_chat, with_variables
    from mindrlhf.data.templates import PLAIN_TURNS
    from mindrlhf.data.turns import TurnTemplate
    from mindrlhf.errors import UserError
    from mindrlhf.files.text import read_text

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
    return TurnTemplate(tokenizer, template, variables=args.chat_template_kwargs), opening
