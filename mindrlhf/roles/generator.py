"""Policy in the generation layout."""

from collections.abc import Iterator

from mindspore import Parameter

from mindrlhf.model_roles import GENERATOR, POLICY_GROUPS
from mindrlhf.models.decoder import Decoder
from mindrlhf.models.packed import PackedWeights
from mindrlhf.models.parameters import decoded_rows
from mindrlhf.parallel.partition import Partition
from mindrlhf.phases import WORDS
from mindrlhf.reshard.online import ReshardStatistics
from mindrlhf.roles.part import MemoryGroup, ModelPart, Opening, Parameters, RolePart
from mindrlhf.roles.publication import Publication, empty_parameter


class Generator(RolePart):
    """Policy in the generation layout, with weights packed as in `rollout.weights`.

    Where decode steps round the trained weights, these are packed for each session of an engine (`open_session`), and
    not again for each of its calls; `words` are their numbers, which mean nothing between sessions. decoder: uses the
    published weights, for held-out problems. rollout_decoder: draws responses to train on; it prefills prompts with the
    published weights, and records the routing of experts if training replays it.
    """

    role = GENERATOR

    def __init__(self, opening: Opening):
        super().__init__(opening)
        self._weights = opening.config.rollout.weights
        self._verifies = opening.config.rollout.verify_weights
        self._records = opening.config.rollout.records_routing
        self._packed: PackedWeights | None = None
        self._words: PackedWeights | None = None
        self._publication: Publication | None = None  # of weights that other ranks train

    def join(self, policy: ModelPart) -> None:
        policy.publish_to(self)

    def receive_from(self, trained: Partition) -> None:
        """Take the weights of ranks that train, which give them meanwhile (`publish_to_ranks`).

        trained: the part of any of them.
        """
        own = {spec.name: empty_parameter(self.partition, spec) for spec in self.partition.specs}
        self._publication = Publication(trained, self.partition, self.collectives, {}, own, self._verifies)
        self.hold(own)

    @property
    def publishes(self) -> bool:
        """True when other ranks give it weights."""
        return self._publication is not None

    def publish(self) -> ReshardStatistics:
        """Take the weights of an update from other ranks, if it `publishes`."""
        done = self._publication.run()
        self.refresh()
        return done

    def memory_groups(self) -> Iterator[MemoryGroup]:
        """Yield its own weights; a policy on this rank yields shared ones."""
        trained = {spec.name for spec in self.partition.trained}
        if self._publication:
            yield WORDS, self.words, True
        for trains, groups in POLICY_GROUPS.items() if self._publication else ():
            own = [parameter for name, parameter in self.parameters.items() if (name in trained) == trains]
            yield groups[2], [*own, *self.packed_parameters(trains)], False

    def hold(self, parameters: Parameters) -> None:
        super().hold(parameters)
        if self._weights == "train":
            packed = self._words and self._words.packed
            self.rollout_decoder = self._decoder(packed=packed, records=True) if self._records else self.decoder
            return
        self._packed = self._pack(self._weights, parameters)
        operators = self.yaml.context.device.operators(self.yaml.model.compute_dtype, self._weights)
        self.rollout_decoder = self._decoder(operators=operators, packed=self._packed.packed, records=self._records)

    def _first_decoder(self) -> Decoder:
        if self._weights == "train":
            self._words = self._open_words(self.parameters)
        return self._decoder(self.yaml.recomputes, packed=self._words and self._words.packed)

    def _open_words(self, parameters: Parameters) -> PackedWeights | None:
        """Open the weights' packed form; None where decode steps do not round them."""
        operators = self.yaml.context.device.operators(self.yaml.model.compute_dtype)
        if not operators.fused or operators.weights == "float32":
            return None
        return self._pack(operators.weights, parameters, lasts=False)

    def _pack(self, weights: str, parameters: Parameters, lasts: bool = True) -> PackedWeights:
        """Pack the weights that decode steps multiply by.

        lasts: see `PackedWeights`.
        """
        model = self.partition.model
        shards = self.shards
        specs = decoded_rows(model)
        head = specs[0] if model.tie_word_embeddings else specs[-1]
        whole = shards.size > 1 and parameters[head.name].shape[0] == model.vocab_size
        rows = {head.name: slice(*shards.share(model.vocab_size))} if whole else {}
        return PackedWeights(weights, specs, parameters, rows, lasts)

    def open_session(self) -> None:
        """Pack the weights that its decode steps round."""
        if self._words:
            self._words.refresh()

    @property
    def words(self) -> list[Parameter]:
        """Packed weights of a session; none where decode steps take the trained ones."""
        return list(self._words.packed.values()) if self._words else []

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
