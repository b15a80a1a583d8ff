"""Conversations that a reward model or a judge reads, and a judge's generated verdict."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import jinja2.meta
import jinja2.sandbox

from mindrlhf.configs.reward_models import JudgeSettings
from mindrlhf.errors import UserError
from mindrlhf.files.text import read_text
from mindrlhf.rewards.batches import MESSAGES, Sample
from mindrlhf.rewards.columns import decode

Messages = list[dict[str, Any]]

THOUGHT_END = "</think>"
VARIABLES = ("question", "answer", "reference", "rubric", "reply")
_HEAD = "Question:\n{{ question }}\n\n"
_ANSWER = "Answer to judge:\n{{ answer }}\n\n"
TEMPLATES = {
    "correct": f"{_HEAD}Reference answer:\n{{{{ reference }}}}\n\n{_ANSWER}"
    "Does the answer come to the same result as the reference answer? {{ reply }}",
    "rubric": f"{_HEAD}Rubric:\n{{{{ rubric }}}}\n\n{_ANSWER}Does the answer meet the rubric? {{{{ reply }}}}",
}
RUBRIC = "The answer is correct, complete, and answers the question."
REPLIES = {
    "log_probs": "Reply with one word, {} or {}.",
    "generated": "Explain briefly, then end with one word, {} or {}.",
}


def conversation(sample: Sample, strip_thinking: bool = False) -> tuple[Messages, Messages]:
    """Return a sample's prompt as messages, and the same with its answer.

    The prompt is the row's conversation, else its question, else the prompt's text as it is.
    """
    row = decode(sample.fields)
    prompt = row.get(MESSAGES)
    if not isinstance(prompt, list):
        prompt = [{"role": "user", "content": _question(sample, row)}]
    return prompt, [*prompt, {"role": "assistant", "content": answer_of(sample, strip_thinking)}]


def answer_of(sample: Sample, strip_thinking: bool) -> str:
    """Return the answer's text, without its reasoning if that is stripped."""
    text = sample.completion
    return text.rpartition(THOUGHT_END)[2].strip() if strip_thinking else text


def _question(sample: Sample, row: Mapping[str, Any]) -> str:
    question = row.get("question")
    return question if isinstance(question, str) and question else sample.prompt


class JudgeTemplate:
    """Question to a judge about a sample, a jinja2 template with `VARIABLES`."""

    def __init__(self, settings: JudgeSettings):
        """Compile the template. Raises UserError if it is none, or has other variables."""
        name = settings.template
        self._where = f"judge: template {name}"
        source = TEMPLATES[name] if name in TEMPLATES else read_text(name, f"{' or '.join(TEMPLATES)}, or a template")
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(undefined=jinja2.StrictUndefined)
        try:
            used = jinja2.meta.find_undeclared_variables(environment.parse(source))
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise UserError(f"{self._where}, line {error.lineno}: not a jinja2 template ({error.message}).") from None
        if unknown := sorted(used - set(VARIABLES)):
            raise UserError(f"{self._where}: uses {unknown[0]}, and a template is given {', '.join(VARIABLES)}.")
        if "answer" not in used:
            raise UserError(f"{self._where}: does not show the answer; write it with {{{{ answer }}}}.")
        self.needs_ground_truth = "reference" in used
        self._settings = settings

    def messages(self, sample: Sample) -> tuple[Messages, Messages]:
        """Return the question without and with the sample's answer. Raises ValueError if rendering fails."""
        settings = self._settings
        row = decode(sample.fields)
        values = {
            "question": _question(sample, row),
            "reference": row.get("ground_truth", ""),
            "rubric": row.get("rubric") or settings.rubric or RUBRIC,
            "reply": REPLIES[settings.verdict].format(*settings.words),
        }
        answers = ("", answer_of(sample, settings.strip_thinking))
        try:
            texts = [self._template.render(**values, answer=answer) for answer in answers]
        except Exception as error:  # the template is the user's program
            raise ValueError(f"{self._where}: rendering fails ({type(error).__name__}: {error})") from None
        bare, whole = ([{"role": "user", "content": text}] for text in texts)
        return bare, whole


def read_verdict(text: str, words: Sequence[str]) -> float | None:
    """Find a judge's verdict: 1 or 0 by the last of its words."""
    said = re.findall(rf"(?<!\w)(?:{'|'.join(map(re.escape, words))})(?!\w)", text, re.IGNORECASE)
    return float(said[-1].lower() == words[0].lower()) if said else None
