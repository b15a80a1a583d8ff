"""Conversations with a pool's environments, for tests: partners, prompts, and calls of tools as text."""

import json

import numpy as np

from mindrlhf.environments.conversations import Conversations
from mindrlhf.types import Prompt


def partner_of(pool, template, tokenizer, max_turns=8):
    return Conversations(pool, template, lambda ids: tokenizer.decode(ids, skip_special_tokens=True), 5, max_turns)


def prompts(*fields):
    return [Prompt(10 + number, np.ones(3, np.int32), values) for number, values in enumerate(fields)]


def call(tool, **arguments):
    return f"<tool_call>\n{json.dumps({'name': tool, 'arguments': arguments})}\n</tool_call>"
