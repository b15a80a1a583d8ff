"""The reference model: log-probs that the KL term is measured from, and how it follows the policy."""

from collections.abc import Mapping, Sequence

import numpy as np
from mindspore import Parameter

from mindrlhf import backend
from mindrlhf.training.batch import SequenceGroup
from mindrlhf.training.scoring import Scorer


class Reference:
    """A frozen copy of the policy as it was, or one that is brought nearer to it every so many steps (TR-DPO,
    Gorbatovski et al. 2024, arXiv:2404.09656, section 3).

    parameters, policy: this rank's parts of both, by name. every: steps, 0 is never. share: of the policy in the
    reference after a step that moves it; 1 replaces it.
    """

    def __init__(
        self,
        scorer: Scorer,
        parameters: Mapping[str, Parameter],
        policy: Mapping[str, Parameter],
        every: int = 0,
        share: float = 1.0,
    ):
        self._scorer, self._parameters, self._policy = scorer, parameters, policy
        self._every, self._share = every, share

    def __call__(self, groups: Sequence[SequenceGroup]) -> list[tuple[np.ndarray, ...]]:
        """For each group, G arrays float32[R]."""
        return self._scorer(groups)

    @property
    def compile_s(self) -> float:
        """Seconds of the last call that went into building graphs."""
        return self._scorer.compile_s

    def due(self, step: int) -> bool:
        """Whether it moves after the updates of `step`, counted from 1."""
        return self._every > 0 and step % self._every == 0

    def follow(self) -> None:
        """Moves it towards the policy."""
        for name, parameter in self._parameters.items():
            mine, its = backend.read(parameter), backend.read(self._policy[name])
            backend.write(parameter, its if self._share == 1.0 else self._share * its + (1.0 - self._share) * mine)
