r"""Stated answers in completions, after the thinking: `<answer>` tags, `####`, or `\boxed{}`."""

MARK = "####"
_BOXES = (r"\boxed{", r"\fbox{")


def stated(completion: str) -> str | None:
    r"""Find the text of the stated answer after the thinking; None without any form.

    Of the last `<answer>...</answer>`, or else of all text, it is the rest of the line after the last `####`, else the
    content of the last `\boxed{}`, else the content of the tag.
    """
    text = after_thinking(completion)
    answer = tagged(text)
    if answer is not None:
        text = answer
    for found in (marked(text), boxed(text), answer):
        if found is not None:
            return found.strip()
    return None


def after_thinking(completion: str) -> str:
    """Return the text after the last `</think>`, or all text without one."""
    return completion.rpartition("</think>")[2]


def tagged(text: str) -> str | None:
    """Return the content of the last complete `<answer>...</answer>`."""
    end = text.rfind("</answer>")
    start = text.rfind("<answer>", 0, max(end, 0))
    return text[start + len("<answer>") : end] if start >= 0 else None


def marked(text: str) -> str | None:
    """Return the rest of the line after the last `####` (GSM8K), possibly empty."""
    _, mark, rest = text.rpartition(MARK)
    return rest.strip().partition("\n")[0].strip() if mark else None


def boxed(text: str) -> str | None:
    r"""Return the content of the last `\boxed{}` or `\fbox{}`; None if never closed."""
    start = max(text.rfind(box) + len(box) if box in text else -1 for box in _BOXES)
    if start < 0:
        return None
    depth = 1
    for end in range(start, len(text)):
        depth += (text[end] == "{") - (text[end] == "}")
        if depth == 0:
            return text[start:end]
    return None
