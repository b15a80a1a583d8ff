"""Inputs of reward functions, made of rollouts."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from mindrlhf.rewards.batches import Sample
from mindrlhf.rollout.partner import EnvironmentRewards
from mindrlhf.types import RolloutGroup


def reward_samples(
    decode: Callable[[Iterable[int]], str],
    groups: Sequence[RolloutGroup],
    max_new_tokens: int,
    own: EnvironmentRewards = (),
) -> list[Sample]:
    """Build the inputs of reward functions.

    These are both texts, the task's fields, token ids, and more. own: for conversations, as `Partner.rewards`. A
    completion is the text of sampled tokens. Further fields: `response_length` and `max_new_tokens`, in tokens; for
    conversations `environment_reward`, if there is one (`nan` if the environment failed to give it), and
    `conversation`, the text with all context.
    """
    every = [(group.prompt, rollout) for group in groups for rollout in group.rollouts]
    samples = []
    for (prompt, rollout), reward in zip(every, own or [None] * len(every), strict=True):
        said = rollout.response_ids[rollout.sampled]
        fields = {**prompt.fields, "response_length": str(len(said)), "max_new_tokens": str(max_new_tokens)}
        if own:
            fields["conversation"] = decode(rollout.response_ids)
            fields |= {} if reward is None else {"environment_reward": str(reward)}
        asked: Any = prompt.token_ids  # functions take it as the sequence that an array is
        samples.append(Sample(decode(prompt.text_ids), decode(said), fields, asked, said, prompt.objects))
    return samples
