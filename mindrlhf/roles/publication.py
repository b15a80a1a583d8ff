"""Publication of trained weights to the layout that generates."""

import numpy as np
from mindspore import Parameter, Tensor

from mindrlhf.backend.comm.collectives import Collectives
from mindrlhf.models.parameters import ParameterSpec
from mindrlhf.parallel.layout import Layout
from mindrlhf.parallel.partition import Partition
from mindrlhf.reshard.online import OnlineReshard, ReshardStatistics
from mindrlhf.reshard.plan import plan
from mindrlhf.roles.part import Parameters


class Publication:
    """One rank's share in bringing trained weights to the layout that generates.

    All ranks of both layouts make it at the same time, and all weights are there then; `run` brings those that train,
    after updates. trained, generating: any rank's part of either layout. source, destination: this rank's parameters in
    each layout, none outside of it. verifies: compare checksums afterwards.
    """

    def __init__(
        self,
        trained: Partition,
        generating: Partition,
        collectives: Collectives,
        source: Parameters,
        destination: Parameters,
        verifies: bool,
    ):
        def open_reshard(before: Layout, after: Layout) -> OnlineReshard:
            return OnlineReshard(plan(before, after), collectives, source, destination)

        self._verifies = verifies
        self._reshard: OnlineReshard | None = open_reshard(trained.layout, generating.layout)
        self._reshard.run(verifies)
        if trained.trained_layout != trained.layout:
            differ = trained.trained_layout != generating.trained_layout
            self._reshard = open_reshard(trained.trained_layout, generating.trained_layout) if differ else None

    @property
    def moves(self) -> bool:
        """True if weights that train move between the layouts."""
        return self._reshard is not None

    def run(self) -> ReshardStatistics:
        """Move the weights that train, if they move; every rank calls it."""
        return self._reshard.run(self._verifies)


def empty_parameter(generating: Partition, spec: ParameterSpec) -> Parameter:
    """Make a rank's part of a published weight, without content."""
    empty = Tensor(np.empty(generating.shape(spec), np.float32))
    return Parameter(empty, name=f"infer.{spec.name}", requires_grad=False)
