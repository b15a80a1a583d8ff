"""Trained model, whose weights also generate."""

from collections.abc import Iterator

from mindrlhf.checkpoint.weights import continued_reader
from mindrlhf.model_roles import POLICY, POLICY_GROUPS
from mindrlhf.models.parameters import parameter_table
from mindrlhf.parallel.partition import Partition
from mindrlhf.phases import WORDS
from mindrlhf.reshard.online import ReshardStatistics
from mindrlhf.roles.generator import Generator
from mindrlhf.roles.part import MemoryGroup, ModelPart, Opening, Parameters, RolePart
from mindrlhf.roles.publication import Publication, empty_parameter


class TrainedModel(RolePart):
    """Trained model in the training layout; a derived class opens its updater.

    Its weights come from a resumed run's checkpoint, else from the policy's path. verifies: compare
    checksums of the published weights with the trained ones.
    """

    role = POLICY
    what = "trained model"
    verifies = False

    def __init__(self, opening: Opening):
        super().__init__(opening)
        checkpoint = opening.checkpoint
        first = opening.weights(self.role.name, adapter=opening.config.lora.adapter_path)
        read = continued_reader(checkpoint, first, self.partition) if checkpoint else first.reader(self.partition)
        self.load(read)
        self._published: Parameters = {}
        self._publication: Publication | None = None
        self._generator: Generator | None = None

    def publish_to(self, generator: ModelPart) -> None:
        """Give the weights to the part that generates.

        `publish` brings the trained weights up to date after an update.
        A parameter is shared, and never moved, if this rank holds the same slice of it in both layouts.
        """
        here, there = self.partition, generator.partition
        self._published = self.parameters
        if here.layout != there.layout:
            self._published = {
                spec.name: self.parameters[spec.name]
                if here.slices(spec) == there.slices(spec)
                else empty_parameter(there, spec)
                for spec in there.specs
            }
            self._publication = Publication(
                here, there, self.collectives, self.parameters, self._published, self.verifies
            )
        generator.hold(self._published)
        self._generator = generator if isinstance(generator, Generator) else None

    def publish_to_ranks(self, generating: Partition) -> None:
        """Give the weights to ranks that only generate, which take them meanwhile (`Generator.receive_from`).

        generating: the part of any of them.
        """
        self._publication = Publication(
            self.partition, generating, self.collectives, self.parameters, {}, self.verifies
        )

    @property
    def publishes(self) -> bool:
        """True when weights move between the layouts, or are packed."""
        return self._moves or (self._generator is not None and self._generator.refreshes)

    @property
    def _moves(self) -> bool:
        return self._publication is not None and self._publication.moves

    def publish(self) -> ReshardStatistics:
        """Bring the published weights up to date, if it `publishes`."""
        done = self._publication.run() if self._moves else self._nothing_moved()
        if self._generator:
            self._generator.refresh()
        return done

    def _nothing_moved(self) -> ReshardStatistics:
        return ReshardStatistics(0, 0, 0, sum(shared.nbytes for shared in self._published.values()), 0.0)

    def memory_groups(self) -> Iterator[MemoryGroup]:
        yield from self.optimizer_groups()
        if self._generator:
            yield WORDS, self._generator.words, True
        own = self.parameters
        published = self._published
        shared = {name for name in own if own[name] is published.get(name)}
        trained = {spec.name for spec in parameter_table(self.partition.model) if spec.trains}
        rows = {True: self.updater.optimizer.own_rows, False: []}
        for trains, groups in POLICY_GROUPS.items():
            mine, theirs = ([name for name in side if (name in trained) == trains] for side in (own, published))
            yield groups[0], [own[name] for name in mine if name in shared], False
            yield groups[1], [*(own[name] for name in mine if name not in shared), *rows[trains]], False
            packed = self._generator.packed_parameters(trains) if self._generator else []
            yield groups[2], [*(published[name] for name in theirs if name not in shared), *packed], False
