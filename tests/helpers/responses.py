"""Responses and their advantages for tests, without MindSpore."""

from dataclasses import replace

import numpy as np

from mindrlhf.types import Experience, Rollout

LOG_PROBS = ("behaviour_log_probs", "policy_log_probs")


def made_rollout(prompt_id, index, ids, finish="eos", seed=0, **tokens) -> Rollout:
    """A response; log-probs are 0 unless given."""
    ids = np.asarray(ids, np.int32)
    zeros = np.zeros(len(ids), np.float32)
    tokens = {"sampled": np.ones(len(ids), bool), **dict.fromkeys(LOG_PROBS, zeros), **tokens}
    return Rollout(prompt_id, index, ids, finish, seed, tokens)


def with_advantages(one: Experience, given) -> Experience:
    """An experience with a number for each response as its tokens' advantages."""
    rows = tuple(np.full(length, value, np.float32) for length, value in zip(one.lengths, given, strict=True))
    return replace(one.with_tokens(advantages=rows), advantages=np.asarray(given, np.float32))
