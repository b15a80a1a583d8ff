"""Reference model of the KL term, frozen or following the policy."""

from collections.abc import Mapping
from dataclasses import dataclass

from mindspore import Parameter

from mindrlhf import backend
from mindrlhf.model_roles import REFERENCE
from mindrlhf.models.initialize import build_parameters
from mindrlhf.roles.part import Arrays, ModelPart, Opening, Parameters, RolePart
from mindrlhf.training.graphs import PolicyLogProbs
from mindrlhf.training.scoring import Scorer


@dataclass(frozen=True)
class Following:
    """Schedule by which a reference follows the policy (TR-DPO, Gorbatovski et al. 2024).

    The source is arXiv:2404.09656, section 3.
    every: interval in steps; 0 is never. share: the policy's share when the reference moves; 1 replaces the reference.
    """

    every: int = 0
    share: float = 1.0

    def due(self, step: int) -> bool:
        """Test that the reference moves after the updates of `step` (from 1)."""
        return self.every > 0 and step % self.every == 0

    def move(self, reference: Mapping[str, Parameter], policy: Mapping[str, Parameter]) -> None:
        """Move this rank's reference parameters towards the policy's, by name."""
        for name, parameter in reference.items():
            mine = backend.read(parameter)
            its = backend.read(policy[name])
            backend.write(parameter, its if self.share == 1.0 else self.share * its + (1.0 - self.share) * mine)


class Reference(RolePart):
    """Copy of the policy's first weights.

    It is frozen, or follows the policy. One that shares weights is complete after `join`.
    Training adapters does not change other weights: a reference that starts from the policy's weights then uses the
    policy's own, with the initial adapters or with none, and has a copy of only those adapters.
    """

    role = REFERENCE

    def __init__(self, opening: Opening):
        super().__init__(opening)
        reference = opening.roles[self.role.name]
        model = reference.model
        config = self._config = opening.config
        algorithm = config.algorithm
        weights = opening.weights(self.role.name, adapter=model.adapter and config.lora.adapter_path)
        self._own = build_parameters(reference.own(self.partition.specs), weights.reader(self.partition))
        self.following = Following(algorithm.reference_sync_steps, algorithm.reference_sync_share)
        if not reference.shares:
            self._complete(self._own)

    def join(self, policy: ModelPart) -> None:
        if len(self._own) < len(self.partition.specs):
            self._complete({**policy.parameters, **self._own})

    def _complete(self, parameters: Parameters) -> None:
        """Build the decoder from its own parameters, and the policy's for all others."""
        self.hold({spec.name: parameters[spec.name] for spec in self.partition.specs})
        head = PolicyLogProbs(self.decoder, self._config.rollout.temperature)
        self.scorer = Scorer(head, self._config.train, self.pipeline)

    def follow(self, policy: ModelPart) -> None:
        """Move towards the policy."""
        self.following.move(self._own, policy.parameters)

    def own(self) -> list[Parameter]:
        return list(self._own.values())

    def arrays(self) -> Arrays:
        return self.kept_arrays() if self.following.every else {}
