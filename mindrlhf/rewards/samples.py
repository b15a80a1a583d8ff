"""Inputs of reward functions, made of rollouts."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from mindrlhf.rewards.batches import Sample
from mindrlhf.rollout.partner import EnvironmentRewards
from mindrlhf.types import Rollout, RolloutGroup

TOOL_IMAGES = "tool_images"
SHOWN = "<image>"
"""In place of a tool's picture in a text, as `data.pictures.MARK` in place of a row's."""


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
    `conversation`, the text with all context, in which a picture that a tool shows is `<image>`. Functions of the
    calling program also get these, as objects of Pillow, in `tool_images`.
    """
    every = [(group.prompt, rollout) for group in groups for rollout in group.rollouts]
    samples = []
    for (prompt, rollout), reward in zip(every, own or [None] * len(every), strict=True):
        said = rollout.response_ids[rollout.sampled]
        fields = {**prompt.fields, "response_length": str(len(said)), "max_new_tokens": str(max_new_tokens)}
        if own:
            fields["conversation"] = _conversation(decode, rollout)
            fields |= {} if reward is None else {"environment_reward": str(reward)}
        asked: Any = prompt.token_ids  # functions take it as the sequence that an array is
        objects = prompt.objects
        if rollout.pictures:
            objects = {**objects, TOOL_IMAGES: [picture.image() for picture in rollout.pictures.values()]}
        samples.append(Sample(decode(prompt.text_ids), decode(said), fields, asked, said, objects))
    return samples


def _conversation(decode: Callable[[Iterable[int]], str], rollout: Rollout) -> str:
    """Decode a conversation with a mark in place of each picture."""
    ids = rollout.response_ids
    text = ""
    end = 0
    for place, picture in rollout.pictures.items():
        text += decode(ids[end:place]) + SHOWN
        end = place + picture.tokens
    return text + decode(ids[end:])
