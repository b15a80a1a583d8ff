"""List of the arrays with a value for each token of a response.

They travel by name from the rollout to the loss. A further array takes an entry here, code that makes it
(`Rollout.tokens` or `Experience.with_tokens`), and code that reads it (`Experience.rows`, or by its name in an
objective's `fields`). Batches, records and replays follow the list.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

CURRENT_POLICY = 1.0  # in `old_log_probs`, far above any log-prob: use the policy that is updated


@dataclass(frozen=True)
class TokenArray:
    """Array [R] of a response, or [R, width] if it is `wide`.

    Only `sampled` and `routing` mean anything on tokens that were not sampled.
    maker, readers: parts of a step; `policy loss` and `value loss` are objectives. dtype: in memory and in a batch.
    padding: value in a batch after the end of a response. absent: value at every token of a response without the array;
    None where the readers need it; a wide one is then of width 0. column: form of the column of this name in `records`,
    which a replay and a resumed run read: `array`, `bytes` (of booleans), `npy` (a file of NumPy's, empty without the
    array), or `json`, [[index of a token, value], ...] of the values that are not NaN. Only arrays of `Rollout.tokens`
    have columns; a replay makes the others again. wide: each token has a row of numbers. of_prompt: it has rows for the
    P - 1 tokens of the prompt without the last, and responses to one prompt share it.
    """

    name: str
    maker: str
    readers: tuple[str, ...]
    dtype: type = np.float32
    padding: float = 0.0
    absent: float | None = None
    column: Literal["array", "bytes", "json", "npy"] | None = None
    wide: bool = False
    of_prompt: bool = False

    def filled(self, length: int) -> np.ndarray:
        """Make the array of a response without it; KeyError if the readers need it."""
        if self.absent is None:
            raise KeyError(self.name)
        return np.full((length, 0) if self.wide else length, self.absent, self.dtype)


_ARRAYS = (
    # True on the tokens that the policy drew. Other tokens (a tool's answer, a user's turn) are context for the tokens
    # after them; nothing is learned, counted or measured on them.
    TokenArray("sampled", "engine", ("credit", "updates", "metrics"), bool, absent=1, column="bytes"),
    # Log-probs under the distribution from which the token was really drawn (temperature, top-k, top-p, min-p and
    # repetition penalty applied), natural as all log-probs.
    TokenArray("behaviour_log_probs", "engine", ("policy loss", "metrics"), column="array"),
    # The same under the policy with temperature only, by the engine.
    TokenArray("policy_log_probs", "engine", ("credit", "updates", "metrics"), column="array"),
    # The step whose weights drew the token; 0 is its group's `policy_step`.
    TokenArray("policy_steps", "engine", ("metrics",), np.int32, absent=0, column="array"),
    # The environment's rewards for turns, at the turns' last tokens, parts of its reward for the conversation; NaN
    # elsewhere.
    TokenArray("turn_rewards", "environments", ("credit",), np.float64, absent=np.nan, column="json"),
    # The experts that computed each token's predecessor, of all layers (`models.routing`).
    TokenArray("routing", "engine", ("policy",), np.uint8, absent=0, column="npy", wide=True),
    # The same of the prompt's tokens.
    TokenArray("prompt_routing", "engine", ("policy",), np.uint8, absent=0, column="npy", wide=True, of_prompt=True),
    # The reference model's log-probs.
    TokenArray("reference_log_probs", "reference", ("policy loss", "credit")),
    # The teacher's log-probs.
    TokenArray("teacher_log_probs", "teacher", ("credit", "metrics")),
    # Log-probs of the policy before the step's first update, by the train graph, if something needs them before it.
    TokenArray("scored_log_probs", "policy", ("credit", "updates")),
    # Log-probs of the policy that a ratio compares with: the same, or of a group that was carried over the drawing
    # policy's. Absent where the first update covers the whole step, so that its own values serve.
    TokenArray("old_log_probs", "policy", ("policy loss", "metrics"), absent=CURRENT_POLICY),
    # The critic's estimates before each token at the start of the step.
    TokenArray("values", "critic", ("value loss", "credit", "metrics")),
    # Targets of the values.
    TokenArray("returns", "credit", ("value loss", "metrics")),
    TokenArray("advantages", "credit", ("policy loss", "updates", "metrics")),
    # The factor of each token's loss (`TrainBatch`).
    TokenArray("weights", "updates", ("updates",)),
    # The weight of the KL term, if it is steered.
    TokenArray("kl_coefficients", "updates", ("policy loss",)),
    # 1 on the tokens that a loss chooses by their log-probs.
    TokenArray("selected", "updates", ("policy loss",)),
)
TOKEN_ARRAYS: Mapping[str, TokenArray] = {array.name: array for array in _ARRAYS}
RECORDED = tuple(array for array in _ARRAYS if array.column)
