"""Data that packages exchange: frozen dataclasses with shapes and dtypes on each field.

Symbols: P prompt tokens, R response tokens (true lengths, never padded), G samples of one prompt. Arrays are NumPy.
Rollouts form a group because they share one `Prompt` object, never because their rows are adjacent.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from mindrlhf.token_arrays import TOKEN_ARRAYS

if TYPE_CHECKING:  # it imports Pillow, which text does not need
    from mindrlhf.images.processor import Picture

FinishReason = Literal["eos", "stop", "length"]
TokenValues = Mapping[str, Mapping[int, float]]
"""Values at some tokens of a response: name in `token_arrays` -> index of a token -> value."""
Notes = Mapping[str, Mapping[str, str]]
"""Texts that reward functions give beside a response's score, by function and name."""


@dataclass(frozen=True, eq=False)
class Prompt:
    """One row of the prompt dataset.

    id: the row index in its dataset; it keys the random numbers of its rollouts.
    token_ids: int32[P], P >= 1, without padding.
    fields: task fields as text: `task`, `question`, `ground_truth`, and further fields of the dataset.
    occurrence: how often the same step has drawn this prompt before; above 0 only where an epoch ends within a step.
    pictures: what its image tokens show, in their order. written_ids: token_ids with each image as one token, as the
        chat template writes them; None is token_ids.
    objects: columns that are no texts, as rows of the calling program have them: its images, for its reward functions.
    """

    id: int
    token_ids: np.ndarray
    fields: Mapping[str, str] = field(default_factory=dict)
    occurrence: int = 0
    pictures: tuple["Picture", ...] = ()
    written_ids: np.ndarray | None = None
    objects: Mapping[str, Any] = field(default_factory=dict)

    @property
    def text_ids(self) -> np.ndarray:
        """Token ids to show as text."""
        return self.token_ids if self.written_ids is None else self.written_ids

    def ended(self, count: int) -> "Prompt":
        """Return the prompt up to its first `count` tokens; the others are no images."""
        left_out = len(self.token_ids) - count
        if not left_out:
            return self
        written = None if self.written_ids is None else self.written_ids[: len(self.written_ids) - left_out]
        return replace(self, token_ids=self.token_ids[:count], written_ids=written)

    def showing(self, known: "Prompt") -> "Prompt":
        """Give a recorded prompt the pictures of its row, which records do not hold."""
        written = known.ended(len(self.token_ids)).written_ids
        return replace(self, pictures=known.pictures, written_ids=written, objects=known.objects)

    @property
    def position_shift(self) -> int:
        """Rotary position minus place of the tokens behind its images, at most 0."""
        return sum(picture.positions - picture.tokens for picture in self.pictures)


@dataclass(frozen=True, eq=False)
class Rollout:
    """One response.

    prompt_id, sample_index: its prompt, and its index among the G samples (0..G-1).
    response_ids: int32[R], including the stop token when the model ended by itself; R >= 1 once it is drawn.
    finish_reason: `eos` a stop token was drawn, `stop` a stop string appeared, `length` the token limit was hit.
    seed: the run's seed that keyed the random numbers.
    tokens: name -> [R], what generation knows of each token (`token_arrays`).
    pictures: what tools and environments showed, in order: index of a picture's first token -> picture.
    """

    prompt_id: int
    sample_index: int
    response_ids: np.ndarray
    finish_reason: FinishReason
    seed: int
    tokens: Mapping[str, np.ndarray]
    pictures: Mapping[int, "Picture"] = field(default_factory=dict)

    @classmethod
    def empty(cls, prompt_id: int, sample_index: int, seed: int) -> "Rollout":
        """Make a response that has no token yet."""
        return cls(prompt_id, sample_index, np.zeros(0, np.int32), "length", seed, {})

    @property
    def sampled(self) -> np.ndarray:
        """Mask of the tokens that the policy drew: bool[R]."""
        return self.row("sampled")

    @property
    def written(self) -> np.ndarray:
        """Mask of the tokens to show as text: bool[R].

        Of each picture it is the first one.
        """
        mask = np.ones(len(self.response_ids), bool)
        for first, picture in self.pictures.items():
            mask[first + 1 : first + picture.tokens] = False
        return mask

    @property
    def text_ids(self) -> np.ndarray:
        """Token ids to show as text."""
        return self.response_ids[self.written] if self.pictures else self.response_ids

    def row(self, name: str) -> np.ndarray:
        """Return an array [R] of `token_arrays`, or its value where it is absent."""
        return self.tokens[name] if name in self.tokens else TOKEN_ARRAYS[name].filled(len(self.response_ids))

    def with_values(self, values: TokenValues) -> "Rollout":
        """Add arrays with values at some tokens."""
        arrays = {name: TOKEN_ARRAYS[name].filled(len(self.response_ids)) for name, given in values.items() if given}
        for name, array in arrays.items():
            for place, value in values[name].items():
                array[place] = value
        return replace(self, tokens={**self.tokens, **arrays})

    @property
    def turn_first(self) -> int:
        """Index of the first token of the present turn; a reply ends one."""
        replies = np.flatnonzero(~self.sampled)
        return int(replies[-1]) + 1 if len(replies) else 0

    @property
    def drawn_turns(self) -> int:
        """Number of turns that the policy drew, one that the limit cut off included."""
        return int(np.count_nonzero(np.diff(self.sampled.astype(np.int8), prepend=0) > 0))

    @property
    def num_turns(self) -> int:
        """Number of turns as verl counts them.

        These are the prompt, the policy's, and answers to them. A conversation ends with a turn of the policy, so it
        has two for each of these; an answer that the limit cut off is not counted.
        """
        return 2 * self.drawn_turns


@dataclass(frozen=True, eq=False)
class RolloutGroup:
    """Prompt with its G rollouts, in order of `sample_index`."""

    prompt: Prompt
    rollouts: tuple[Rollout, ...]


@dataclass(frozen=True, eq=False)
class Experience:
    """Scored group, the input of training.

    rewards: float64[G], the weighted sum over reward functions; NaN (unscored) where one failed or all abstained.
    rewards_by_function: name -> float64[G], unweighted; NaN where that function gave None or failed.
    advantages: float32[G], of each response the mean over its sampled tokens; 0 where the reward is NaN.
    policy_step: the step (from 1) whose weights drew the group; below the current step for a group that was carried
        over.
    trained: bool[G], the responses that enter the loss; None means all of them.
    notes: for each response; empty where no function gives texts.
    greedy_reward: reward of the most probable response to the prompt, NaN if it has none; None when nothing needs it.
    tokens: name -> G arrays [R], what training knows of each token besides (`token_arrays`).
    token_figures: G mappings name -> float32[R], values that the step's last update measured for each token
        (`records`); None if not requested.
    """

    group: RolloutGroup
    rewards: np.ndarray
    rewards_by_function: Mapping[str, np.ndarray]
    advantages: np.ndarray
    policy_step: int
    trained: np.ndarray | None = None
    notes: tuple[Notes, ...] = ()
    greedy_reward: float | None = None
    tokens: Mapping[str, tuple[np.ndarray, ...]] = field(default_factory=dict)
    token_figures: tuple[Mapping[str, np.ndarray], ...] | None = None

    @property
    def lengths(self) -> np.ndarray:
        """Response tokens, sampled or not: int64[G]."""
        return np.array([len(rollout.response_ids) for rollout in self.group.rollouts])

    @property
    def sampled(self) -> tuple[np.ndarray, ...]:
        """Masks of sampled tokens: G arrays bool[R]."""
        return tuple(rollout.sampled for rollout in self.group.rollouts)

    @property
    def sampled_lengths(self) -> np.ndarray:
        """Numbers of sampled tokens: int64[G]."""
        return np.array([np.count_nonzero(row) for row in self.sampled])

    @property
    def trained_tokens(self) -> tuple[np.ndarray, ...]:
        """Masks of the sampled tokens that enter the loss: G arrays bool[R]."""
        if self.trained is None:
            return self.sampled
        return tuple(row & left_in for row, left_in in zip(self.sampled, self.trained, strict=True))

    def rows(self, name: str) -> tuple[np.ndarray, ...]:
        """Return an array of `token_arrays` by name, of training or generation: G arrays [R]."""
        return self.tokens[name] if name in self.tokens else tuple(one.row(name) for one in self.group.rollouts)

    def with_tokens(self, **arrays: tuple[np.ndarray, ...]) -> "Experience":
        """Add arrays by name, in place of earlier ones."""
        return replace(self, tokens={**self.tokens, **arrays})


@dataclass(frozen=True, eq=False)
class TrainBatch:
    """Padded arrays of one compiled train graph: N prompts, G responses each.

    The prompt is split before its last token: `prefix` holds tokens 0..P-2, computed once per group; each
    completion row begins with the last prompt token and ends before the last response token, so that its R positions
    are exactly the positions whose logits predict `targets`.

    prefix_ids: int32[N, P]; prefix_lengths: int32[N], 0 <= length <= P.
    input_ids: int32[N*G, R]; targets: int32[N*G, R]; row n*G + g belongs to prefix n.
    lengths: int32[N*G], number of response tokens in each row: the real tokens, to which later tokens attend.
    mask: float32[N*G, R], 1 on sampled tokens, 0 on other tokens of a response and on the padding after it.
    weights: float32[N*G, R], the factor of each token's loss before the plain sum. It carries the whole
        aggregation rule (global denominators included), is 0 where the mask is, and makes the sum over micro-batches
        and ranks the loss.
    fields: name -> [N*G, R], arrays of `token_arrays` that the objective reads, with their padding.
    by_position: name -> (int32[N, P], int32[N*G, R]), the model's inputs of each position of prompts and completions:
        positions, the place in the sequence; dropout_keys, random numbers for dropout masks, if any; routing, experts
        that are replayed, if any, [..., width].
    images: name -> array, inputs of a vision tower or its rows (`models.inputs`), if any.
    """

    prefix_ids: np.ndarray
    prefix_lengths: np.ndarray
    input_ids: np.ndarray
    targets: np.ndarray
    lengths: np.ndarray
    mask: np.ndarray
    weights: np.ndarray
    fields: Mapping[str, np.ndarray]
    by_position: Mapping[str, tuple[np.ndarray, np.ndarray]]
    images: Mapping[str, np.ndarray] = field(default_factory=dict)

    @property
    def model_inputs(self) -> dict[str, np.ndarray]:
        """Inputs of the model by name (`models.inputs`)."""
        flat = {
            name: np.concatenate([array.reshape((-1, *array.shape[2:])) for array in (prefixes, inputs)])
            for name, (prefixes, inputs) in self.by_position.items()
        }
        return {
            "prefix_ids": self.prefix_ids,
            "prefix_lengths": self.prefix_lengths,
            "input_ids": self.input_ids,
            "lengths": self.lengths,
            **flat,
            **self.images,
        }


def with_missing(
    experiences: Sequence[Experience], name: str, rows: Sequence[tuple[np.ndarray, ...]]
) -> list[Experience]:
    """Add an array to the experiences without it."""
    pairs = zip(experiences, rows, strict=True)
    return [e if name in e.tokens else e.with_tokens(**{name: own}) for e, own in pairs]


def taken(rows: Sequence[np.ndarray], masks: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Take the values of each row where its mask is True: [R] -> [n].

    Masks are bool[R]; the order is kept.
    """
    return [row[mask] for row, mask in zip(rows, masks, strict=True)]


def put_back(rows: Sequence[np.ndarray], masks: Sequence[np.ndarray]) -> tuple[np.ndarray, ...]:
    """Invert `taken`: [n] -> float32[R], 0 where a mask is False."""
    out = tuple(np.zeros(mask.shape, np.float32) for mask in masks)
    for whole, row, mask in zip(out, rows, masks, strict=True):
        whole[mask] = row
    return out
