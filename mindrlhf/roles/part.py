"""One of a rank's two sides in a job, training or generating: its part of the model, and whom it talks to."""

import numpy as np
from mindspore import Parameter

from mindrlhf.backend.comm.collectives import Collectives
from mindrlhf.backend.native import library
from mindrlhf.configs.model import ModelConfig
from mindrlhf.configs.model_yaml import ModelYaml
from mindrlhf.errors import UserError
from mindrlhf.models.decoder import Decoder
from mindrlhf.parallel.data_parallel import DataParallel
from mindrlhf.parallel.gradients import ReduceGradients
from mindrlhf.parallel.partition import Partition
from mindrlhf.parallel.pipeline import PipelineAxis
from mindrlhf.parallel.tensor_parallel import TensorParallel


class Side:
    """Built from one model YAML, by all ranks at the same time and in the same order: it makes their groups.

    collectives: of all ranks. partition: what this rank holds. data_parallel, shards, pipeline: its axes.
    micro_batches: how many an update has at least, to keep the stages of a pipeline busy.
    first_of_replica: whether of all ranks that work on the same data this one speaks for them.
    Raises `UserError` where the layout does not divide the model.
    """

    def __init__(self, yaml: ModelYaml, model: ModelConfig, collectives: Collectives):
        self._yaml, self.collectives = yaml, collectives
        rank = collectives.world.rank
        self.partition = Partition.of_yaml(yaml, model, rank)
        mesh = self.partition.mesh
        self.data_parallel = DataParallel(collectives, mesh.group(rank, "dp"))
        sequence = self.partition.sequence
        self.shards = TensorParallel(collectives, mesh.group(rank, "tp"), sequence=sequence)
        self.pipeline = PipelineAxis(collectives, mesh.group(rank, "pp"))
        self.micro_batches = yaml.parallel.micro_batch_num if mesh.pp > 1 else 1
        place = self.partition.coordinates
        self.first_of_replica = place.pp == 0 and place.tp == 0

    def decoder(self, parameters: dict[str, Parameter], kernels, max_positions: int) -> Decoder:
        """The graph of this rank's part of the model, over its parameters by name.

        Raises UserError where its layers should compute activations again and cannot.
        """
        part, dtype = self.partition, self._yaml.model.compute_dtype
        stage, last = part.coordinates.pp, part.mesh.pp - 1
        again = self._yaml.recompute.recompute is True and last == 0
        places = (self.shards, part.layers, stage == 0, stage == last, again)
        decoder = Decoder(part.model, parameters, kernels, max_positions, dtype, *places)
        if again and not decoder.fused:
            raise UserError(
                f"{self._yaml.path}: recompute_config.recompute is True, and only the fused operators compute layers "
                f"again, which are not there ({library().problem}); install g++ or set it to False."
            )
        return decoder

    def gradient_reducer(self, gradients) -> ReduceGradients | None:
        """What sums gradient buffers over ranks in place when called; None where no rank shares any."""
        groups = self.partition.gradient_groups()
        wanted = self._yaml.parallel.gradient_aggregation_group
        return ReduceGradients(gradients, groups, self.collectives, wanted) if groups else None

    @property
    def counted(self) -> list[bool]:
        """For each parameter that this rank holds, whether its part enters sums over a replica's parameters."""
        return [self.partition.counts(spec) for spec in self.partition.specs]

    def sum_over_replica(self, number: float) -> float:
        """The sum over the ranks that together hold the model."""
        group = self.partition.mesh.group(self.partition.rank, "pp", "tp")
        return float(self.collectives.all_reduce_sum(np.array([number], np.float64), group)[0])
