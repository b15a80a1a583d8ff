"""Penalty for repetition."""

import re
from collections.abc import Mapping

# Words; in scripts without spaces, and for punctuation, single characters.
_TOKEN = re.compile(r"[\u3040-\u30ff\u3400-\u9fff]|[^\W\u3040-\u30ff\u3400-\u9fff]+|[^\w\s]")


def repetition_penalty(
    prompt: str, completion: str, fields: Mapping[str, str], ngram: int = 3, max_penalty: float = 1.0
) -> float:
    """Penalise repeated n-grams: -max_penalty * (1 - distinct / all) (Yeo et al. 2025).

    ngram: words. 0 when the completion is shorter than that.
    """
    if ngram < 1:
        raise ValueError(f"repetition_penalty: ngram is {ngram}, and must be at least 1 word")
    words = _TOKEN.findall(completion.lower())
    ngrams = list(zip(*(words[start:] for start in range(ngram)), strict=False))
    if not ngrams:
        return 0.0
    return -max_penalty * (1.0 - len(set(ngrams)) / len(ngrams))
