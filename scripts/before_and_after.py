"""Accuracies of two models and their answers to the same problems: python scripts/before_and_after.py BEFORE AFTER.

BEFORE, AFTER: files of `mindrlhf eval --output` on the same problems, with one answer to each.
"""

import sys
from pathlib import Path

from mindrlhf.evaluation.pass_at_k import Answer, compare, interval, read_answers

PROBLEMS = 5  # that are shown


def accuracy(answers: list[Answer]) -> str:
    """Describe the share of right answers, its 95% interval, and lengths."""
    right = sum(one.solves for one in answers)
    low, high = interval(right, len(answers))
    length = sum(one.length for one in answers) / len(answers)
    cut = sum(one.truncated for one in answers) / len(answers)
    return f"{right / len(answers):.3f} ({low:.3f} to {high:.3f}), {length:.0f} tokens, {cut:.0%} cut at the limit"


def main(before: Path, after: Path) -> None:
    answers = {"before": read_answers(before), "after": read_answers(after)}
    for pair in list(zip(*answers.values(), strict=True))[:PROBLEMS]:
        print(f"{pair[0].question}  [{pair[0].ground_truth}]")
        for name, one in zip(answers, pair, strict=True):
            text = " ".join(one.answer.split())
            print(f"  {name:6}  {'right' if one.solves else 'wrong'}  {text}")
    change = compare(*answers.values())
    for name, ones in answers.items():
        print(f"held-out accuracy, greedy, {name}: {accuracy(ones)}")
    print(f"difference: {change.difference:+.3f} ({change.low:+.3f} to {change.high:+.3f}), p = {change.p:.1g}")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
