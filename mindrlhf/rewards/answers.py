r"""Stated answers in completions, after the thinking: `<answer>` tags, `####`, or `\boxed{}`."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

MARK = "####"

_BRACES = re.compile(r"(?P<box>\\(?:boxed|[bf]box)\s*\{)|(?P<escaped>\\.)|(?P<opening>\{)|(?P<closing>\})", re.DOTALL)
_OPEN_BOX = re.compile(r"\\(?:boxed|[bf]box)[ \t]+([^\s{}$\\]+)")  # without braces, up to a space
_MARKED = re.compile(r"####+\s*([^\n]*)")
_LABEL = re.compile(r"[*_\s]*(?:the\s+)?(?:final\s+)?answer\s*(?:is\b|:)?[*_\s:]*", re.IGNORECASE)
# Beginnings of Markdown's headings of level 4: `#### Step 1: count`, `#### 2. Check`.
_HEADING = re.compile(r"[*_\s]*(?:[^\W\d_]{2,}(?![^\W\d_]|\s*=)|\d+[.)]\s+[^\W\d_])")


def truth_of(fields: Mapping[str, Any]) -> str:
    """Write the ground truth as text; ValueError for bytes, which no answer would equal."""
    truth = fields["ground_truth"]
    if isinstance(truth, bytes | bytearray):
        raise ValueError(f"the ground truth {truth[:40]!r} is bytes, and should be text or a number")
    return str(truth)


def stated(prompt: str, completion: str) -> str | None:
    r"""Find the text of the stated answer after the thinking; None without any form.

    Of the last `<answer>...</answer>`, or else of all text, it is what comes last: the rest of the line after `####`,
    or the content of a `\boxed{}`; else the content of the tag. A line after `####` that begins as a heading does
    counts only if nothing follows it and there is no box.
    """
    text = after_thinking(prompt, completion)
    answer = tagged(text)
    if answer is not None:
        text = answer
    found = max([*_boxes(text), *_marks(text)], default=None) or _last_line(text)
    chosen = answer if found is None else found[1]
    return None if chosen is None else _unlabelled(chosen)


def _unlabelled(answer: str) -> str:
    """Take `The final answer is` off the beginning of an answer."""
    label = _LABEL.match(answer)
    return answer[label.end() if label else 0 :].strip()


def after_thinking(prompt: str, completion: str) -> str:
    """Return the text after the last `</think>`, without a thought that is not closed.

    A prompt that ends with `<think>` has opened one.
    """
    if "</think>" not in completion and opens_thought(prompt):
        return ""
    return completion.rpartition("</think>")[2].partition("<think>")[0]


def opens_thought(prompt: str) -> bool:
    """Test for a prompt after which the model is thinking."""
    return prompt.rstrip().endswith("<think>")


def tagged(text: str) -> str | None:
    """Return the content of the last complete `<answer>...</answer>`."""
    end = text.rfind("</answer>")
    start = text.rfind("<answer>", 0, max(end, 0))
    return text[start + len("<answer>") : end] if start >= 0 else None


def _marks(text: str) -> Iterator[tuple[int, str]]:
    """Yield (end, rest of the line) of each `####` without heading.

    The rest may be the next line.
    """
    for found in _MARKED.finditer(text):
        if (line := _unlabelled(found[1])) and not _HEADING.match(line):
            yield found.end(), found[1]


def _last_line(text: str) -> tuple[int, str] | None:
    """Return what is after `####` in the last line, heading or not."""
    *_, last = ["", *text.strip().splitlines()]
    found = _MARKED.search(last)
    return (0, found[1]) if found else None


def boxes(text: str) -> list[str]:
    r"""List the contents of all closed `\boxed{}`, in the order of their ends."""
    return [content for _, content in _boxes(text)]


def _boxes(text: str) -> Iterator[tuple[int, str]]:
    """Yield (end, content) of each closed box, in the order of their ends."""
    opened: list[int | None] = []  # the starts of boxes, and None for other braces
    for found in _BRACES.finditer(text):
        if found["box"] or found["opening"]:
            opened.append(found.end() if found["box"] else None)
        elif found["closing"] and opened and (start := opened.pop()) is not None:
            yield found.end(), text[start : found.start()]
    for found in _OPEN_BOX.finditer(text):
        yield found.end(), found[1]
