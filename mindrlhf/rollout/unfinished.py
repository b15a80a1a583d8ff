"""Answers that are drawn in parts, each with the weights of its time.

An unfinished answer is a `Rollout` whose last part ended at a limit below `rollout.max_new_tokens`. Its next part
begins with the keys and values of all that it has, computed again with the weights of now: kept ones would be of
other weights, and a cache of every answer in flight would take memory that slots do not need.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate

import numpy as np

from mindrlhf.configs.grpo import RolloutSettings
from mindrlhf.records.batches_ahead import Batch, BatchesAhead
from mindrlhf.rollout.partner import Begun, Opened, Partner
from mindrlhf.rollout.request import Request
from mindrlhf.types import Experience, Prompt, Rollout, RolloutGroup

Further = Callable[[Sequence[tuple[int, RolloutGroup, int]], int], list[RolloutGroup]]
"""Drawing of groups, each with the step that trains on it and the most further tokens of its unfinished answers, by the
weights of a step -> the groups with these tokens."""


def not_begun(prompt: Prompt, settings: RolloutSettings, seed: int) -> RolloutGroup:
    """Make a group whose answers have no tokens yet."""
    answers = (Rollout.empty(prompt.id, index, seed) for index in range(settings.num_generations))
    return RolloutGroup(prompt, tuple(answers))


def unfinished(group: RolloutGroup, limit: int) -> list[int]:
    """List the answers that go on; limit: most tokens of an answer."""
    answers = enumerate(group.rollouts)
    return [i for i, one in answers if one.finish_reason == "length" and len(one.response_ids) < limit]


def requests_of(
    groups: Sequence[tuple[int, RolloutGroup, int]],
    settings: RolloutSettings,
    seed: int,
    partner: Partner | None = None,
) -> list[Request]:
    """Make requests for further tokens of unfinished answers.

    groups: each with the step that keys its random numbers, and the most further tokens of an answer. partner: goes on
    with their conversations, and begins those without a token.
    """
    limit = settings.max_new_tokens
    going = [
        [Begun(group.prompt, group.rollouts[i], step) for i in unfinished(group, limit)] for step, group, _ in groups
    ]
    rows = list(accumulate(map(len, going), initial=0))
    if partner:
        opened = partner.resume([one for own in going for one in own])
        parts = [opened[row : row + len(own)] for row, own in zip(rows, going, strict=False)]
        groups = [
            (step, _opened(group, own, limit), more) for (step, group, more), own in zip(groups, parts, strict=True)
        ]
    return [
        request_of(group, settings, seed, step, more, partner, row)
        for (step, group, more), row in zip(groups, rows, strict=False)
    ]


def _opened(group: RolloutGroup, opened: Sequence[Opened], limit: int) -> RolloutGroup:
    """Put what a partner appends before the first turns into answers without a token.

    limit: most tokens of an answer, of which one at least is drawn.
    """
    answers = list(group.rollouts)
    for place, (_, ids) in zip(unfinished(group, limit), opened, strict=True):
        if len(ids):
            ids = ids[: limit - 1]
            answers[place] = replace(answers[place], response_ids=ids, tokens={"sampled": np.zeros(len(ids), bool)})
    return RolloutGroup(opened[0][0] if opened else group.prompt, tuple(answers))


def request_of(
    group: RolloutGroup,
    settings: RolloutSettings,
    seed: int,
    step: int,
    more: int,
    partner: Partner | None = None,
    row: int = 0,
) -> Request:
    """Make the request for up to `more` tokens of each unfinished answer.

    seed, step: key the random numbers, together with the answers' places in the group. partner, row: see `Request`.
    """
    places = unfinished(group, settings.max_new_tokens)
    begun = [group.rollouts[place].response_ids for place in places]
    first = group.prompt.occurrence * len(group.rollouts)
    return Request(
        group.prompt,
        settings,
        len(places),
        seed,
        step,
        partner,
        row,
        begun=begun,
        firsts=[group.rollouts[place].turn_first for place in places],
        limits=[min(settings.max_new_tokens, len(ids) + more) for ids in begun],
        keys=[first + place for place in places],
        whole=len(group.rollouts),
    )


def continued(group: RolloutGroup, drawn: RolloutGroup, limit: int, step: int) -> RolloutGroup:
    """Add the drawn parts of the unfinished answers.

    drawn: the answer to their request, whose prompt may end earlier. step: of the weights that drew it.
    """
    answers = list(group.rollouts)
    for place, part in zip(unfinished(group, limit), drawn.rollouts, strict=True):
        answers[place] = _joined(answers[place], part, step)
    return RolloutGroup(drawn.prompt, tuple(answers))


def _joined(answer: Rollout, part: Rollout, step: int) -> Rollout:
    """Join an answer with a part that repeats its tokens first."""
    known = len(answer.response_ids)
    more = len(part.response_ids) - known
    names = ("sampled", "behaviour_log_probs", "policy_log_probs")
    tokens = {name: part.row(name) for name in names}
    if known:
        tokens = {name: np.concatenate([answer.row(name), array[known:]]) for name, array in tokens.items()}
    tokens["policy_steps"] = np.concatenate([answer.row("policy_steps"), np.full(more, step, np.int32)])
    if "routing" in part.tokens:
        tokens |= _joined_routing(answer, part)
    return replace(answer, response_ids=part.response_ids, finish_reason=part.finish_reason, tokens=tokens)


def _joined_routing(answer: Rollout, part: Rollout) -> dict[str, np.ndarray]:
    """Join the routing of an answer with that of a part.

    A drawn token keeps the one that it was drawn with. What follows a part's last drawn token was not computed then,
    and is by the next part.
    """
    if "routing" not in answer.tokens:
        return {name: part.row(name) for name in ("routing", "prompt_routing")}
    computed = int(np.flatnonzero(answer.sampled)[-1]) + 1
    routing = np.concatenate([answer.row("routing")[:computed], part.row("routing")[computed:]])
    return {"routing": routing, "prompt_routing": answer.row("prompt_routing")}


class InParts:
    """Batches of which each step draws some tokens.

    In a step every unfinished answer, of whichever batch, gets an equal share of the step's quota, and those of the
    step's own batch go on to their ends. So which weights draw a token depends on the numbers of tokens of answers
    before, and on no slot, rank or clock; and a step computes what an answer has only once.

    ahead: the batches. further: draws.
    """

    def __init__(self, ahead: BatchesAhead, further: Further, settings: RolloutSettings, seed: int):
        self._ahead = ahead
        self._further = further
        self._settings = settings
        self._limit = settings.max_new_tokens
        self._seed = seed

    def begin(self, number: int, prompts: Sequence[Prompt], step: int, position: int) -> None:
        """Add the batch of a step.

        step: whose weights draw its first tokens. position: see `Batch`.
        """
        groups = [not_begun(prompt, self._settings, self._seed) for prompt in prompts]
        self._ahead.put(number, Batch([_unscored(group, step) for group in groups], {}, position, whole=False))

    def share(self, waiting: int) -> int:
        """Compute the most tokens that an answer gets of a step's quota.

        waiting: number of answers that the step begins, if the quota has a token for each.
        """
        quota = self._settings.tokens_per_step
        return self._limit if quota is None else quota // max(self.count(self._ahead.steps) + waiting, 1)

    def draw(self, limits: Mapping[int, int], step: int) -> int:
        """Draw further tokens of unfinished answers; returns their number.

        limits: step of a batch -> most tokens of each of its answers. step: of the weights that draw.
        """
        places = self._places([*limits])
        before = [self._group(place) for place in places]
        given = [(number, group, limits[number]) for (number, _), group in zip(places, before, strict=True)]
        after = self._further(given, step) if given else []
        self._put(dict(zip(places, after, strict=True)))
        return count_tokens(after) - count_tokens(before)

    def count(self, numbers: Sequence[int]) -> int:
        """Count the unfinished answers of batches."""
        return sum(len(unfinished(self._group(place), self._limit)) for place in self._places(numbers))

    def ended(self, number: int) -> bool:
        """Test for a batch whose answers are whole and not scored."""
        return not self._ahead[number].whole and not self.count([number])

    def _places(self, numbers: Sequence[int]) -> list[tuple[int, int]]:
        """List the unfinished groups of batches: step, and index in its batch."""
        places = [(n, i) for n in numbers if not self._ahead[n].whole for i in range(len(self._ahead[n].experiences))]
        return [place for place in places if unfinished(self._group(place), self._limit)]

    def _group(self, place: tuple[int, int]) -> RolloutGroup:
        number, index = place
        return self._ahead[number].experiences[index].group

    def _put(self, changed: Mapping[tuple[int, int], RolloutGroup]) -> None:
        """Put other states of groups in place."""
        for number in dict.fromkeys(number for number, _ in changed):
            batch = self._ahead[number]
            experiences = enumerate(batch.experiences)
            experiences = [replace(e, group=changed.get((number, i), e.group)) for i, e in experiences]
            self._ahead.put(number, replace(batch, experiences=experiences))


def _unscored(group: RolloutGroup, step: int) -> Experience:
    """Make the experience of a group that is not whole."""
    size = len(group.rollouts)
    return Experience(group, np.full(size, np.nan), {}, np.zeros(size, np.float32), policy_step=step)


def count_tokens(groups: Sequence[RolloutGroup]) -> int:
    """Count the tokens of all answers that were drawn so far."""
    return sum(int(rollout.sampled.sum()) for group in groups for rollout in group.rollouts)
