"""Flags of commands that generate with a model.

Imports no NumPy, whose threads would take signals.
"""

import argparse
import json
from typing import Any

from mindrlhf.backend import default_device
from mindrlhf.commands.train import add_device_argument, add_model_arguments
from mindrlhf.errors import UserError

PLAIN = "plain"  # the template that writes bare texts


def add_model_flags(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of model, tokenizer, seed and device."""
    add = parser.add_argument
    model = (
        "HF directory, a hub's id, GGUF file, adapter in PEFT's format (with its own base), or checkpoint of training "
        "(step_N, latest, best)"
    )
    add("--model", required=True, help=model)
    add("--adapter", help="adapter in PEFT's format, which --model is the base of")
    add_model_arguments(parser)
    add("--seed", type=int, default=0, help="of the responses that are drawn (default 0)")
    add_device_argument(parser)
    parser.set_defaults(device_target=default_device())


def add_message_flags(parser: argparse.ArgumentParser, templates: str) -> None:
    """Declare the flags of typed messages; templates: description of --template's values."""
    add = parser.add_argument
    add("--template", help=f"{templates} (default: the tokenizer's own chat template, or that of the model's family)")
    add("--system_prompt", help='system prompt in place of the template\'s own; "" for none')
    add_template_variables(parser)


def add_template_variables(parser: argparse.ArgumentParser) -> None:
    """Declare the flag of a chat template's variables."""
    text = 'variables of the chat template as JSON: \'{"enable_thinking": false}\'; "chat_template" chooses one by name'
    parser.add_argument("--chat_template_kwargs", type=_variables, default={}, metavar="JSON", help=text)


def _variables(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise UserError(f'--chat_template_kwargs {text}: should be a JSON object, as {{"enable_thinking": false}}.')
    return found
