"""Policy in the generation layout."""

from collections.abc import Iterator

from mindspore import Parameter

from mindrlhf.model_roles import GENERATOR
from mindrlhf.models.packed import PackedWeights
from mindrlhf.models.parameters import decoded_rows
from mindrlhf.roles.part import MemoryGroup, ModelPart, Opening, Parameters, RolePart


class Generator(RolePart):
    """Policy in the generation layout, with weights packed as in `rollout.weights`.

    decoder: uses the published weights, for held-out problems. rollout_decoder: draws responses to train on; it
    prefills prompts with the published weights.
    """

    role = GENERATOR

    def __init__(self, opening: Opening):
        super().__init__(opening)
        self._weights = opening.config.rollout.weights
        self._packed: PackedWeights | None = None

    def join(self, policy: ModelPart) -> None:
        policy.publish_to(self)

    def memory_groups(self) -> Iterator[MemoryGroup]:
        yield from ()  # the policy registers them

    def hold(self, parameters: Parameters) -> None:
        super().hold(parameters)
        self.rollout_decoder = self.decoder
        if self._weights == "train":
            return
        model = self.partition.model
        shards = self.shards
        specs = decoded_rows(model)
        head = specs[0] if model.tie_word_embeddings else specs[-1]
        whole = shards.size > 1 and parameters[head.name].shape[0] == model.vocab_size
        rows = {head.name: slice(*shards.share(model.vocab_size))} if whole else {}
        self._packed = PackedWeights(self._weights, specs, parameters, rows)
        operators = self.yaml.context.device.operators(self.yaml.model.compute_dtype, self._weights)
        self.rollout_decoder = self._decoder(operators=operators, packed=self._packed.packed)

    @property
    def refreshes(self) -> bool:
        """True if packed weights change after updates."""
        return self._packed is not None and bool(self._packed.trained)

    def refresh(self) -> None:
        """Pack the published weights that have changed, if it `refreshes`."""
        if self._packed:
            self._packed.refresh()

    def packed_parameters(self, trained: bool) -> list[Parameter]:
        """List the packed copies of weights that train, or of the others."""
        return self._packed.parameters(trained) if self._packed else []
