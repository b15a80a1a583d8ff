"""What a completion votes for when the majority of several answers is taken (maj@k).

The same forms of an answer are read as for GSM8K's reward: a stated number votes for its value, so that `18`, `18.0`
and `$18` are one vote; a stated text (an expression of the countdown task) for itself without its spaces.
"""

from mindrlhf.rewards import answers, numbers


def vote(completion: str) -> str | None:
    """The answer in a form in which equal answers are equal texts; None when there is none to be found."""
    answer = answers.stated(completion)
    if answer is None:
        number = numbers.last(answers.after_thinking(completion))
        return None if number is None else str(number)
    number = numbers.stated(answer)
    return "".join(answer.split()) or None if number is None else str(number)
