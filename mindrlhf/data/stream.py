"""Endless stream of training prompts, with a cursor that can be saved."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mindrlhf.errors import UserError
from mindrlhf.types import Prompt


class PromptStream:
    """Stream of `prompts_per_step` prompts at a time, epoch after epoch.

    An epoch's order depends on (seed, epoch) alone. No row comes again before all have come; a step may cross epochs.
    """

    def __init__(self, prompts: Sequence[Prompt], prompts_per_step: int, shuffle: bool, seed: int):
        if not prompts:
            raise UserError("the prompt dataset holds no rows.")
        if prompts_per_step < 1:
            raise ValueError(f"prompts_per_step {prompts_per_step} is below 1")
        self.prompts = prompts
        self.prompts_per_step = prompts_per_step
        self.shuffle = shuffle
        self.seed = seed
        self.position = 0  # prompts given so far
        self._order = (-1, np.empty(0, np.int64))  # (epoch, its row order)

    @property
    def epoch(self) -> int:
        """Number of complete epochs."""
        return self.position // len(self.prompts)

    @property
    def pictured(self) -> dict[int, Prompt]:
        """The prompts with pictures, by id."""
        return {prompt.id: prompt for prompt in self.prompts if prompt.pictures}

    def next(self, count: int | None = None) -> list[Prompt]:
        """Draw the next `count` prompts, by default `prompts_per_step`."""
        end = self.position + (self.prompts_per_step if count is None else count)
        step = [self._at(position) for position in range(self.position, end)]
        self.position = end
        return step

    def state_dict(self) -> dict[str, Any]:
        """Return the cursor, and the data and order that it is valid for."""
        return {"position": self.position, **self._identity()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved cursor; UserError for a cursor of other data or order."""
        for key, value in self._identity().items():
            if state.get(key) != value:
                found = f"cannot resume the prompt stream: its {key} was {state.get(key)} and is {value} now"
                raise UserError(f"{found}; resume with the dataset and seed of the interrupted run.")
        self.position = state["position"]

    def _identity(self) -> dict[str, Any]:
        return {"rows": len(self.prompts), "seed": self.seed, "shuffle": self.shuffle}

    def _at(self, position: int) -> Prompt:
        epoch, index = divmod(position, len(self.prompts))
        if not self.shuffle:
            return self.prompts[index]
        if self._order[0] != epoch:
            self._order = (epoch, np.random.default_rng([self.seed, epoch]).permutation(len(self.prompts)))
        return self.prompts[self._order[1][index]]
