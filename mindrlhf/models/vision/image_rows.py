"""Rows of image tokens in a decoder's graph, from its tower or an input."""

from collections.abc import Mapping

from mindspore import Parameter, nn, ops

from mindrlhf.backend.comm.broadcast import expand
from mindrlhf.backend.comm.graph_collectives import TensorParallel
from mindrlhf.backend.operators import Operators
from mindrlhf.configs.vision import VisionConfig
from mindrlhf.models.parameter_spec import ParameterSpec
from mindrlhf.models.vision.tower import Tower


class ImageRows(nn.Cell):
    """Tower's rows in place of the embeddings of image tokens.

    vision: None of a model of text. adapters: see `halves.Materials`. has_tower: False where the rows are an input of
    the graph.
    """

    def __init__(
        self,
        vision: VisionConfig | None,
        parameters: Mapping[str, Parameter],
        operators: Operators,
        adapters: Mapping[str, ParameterSpec],
        shards: TensorParallel,
        has_tower: bool,
    ):
        super().__init__(auto_prefix=False)
        self.has_tower = has_tower
        self.tower = Tower(vision, parameters, operators, adapters) if vision and has_tower else None
        self.sequence = shards.sequence
        self.shard = shards.rank

    def construct(self, x, places, arrays):
        """Replace rows of x [rows, hidden], this rank's slice under sequence parallelism.

        places: IMAGE_ROWS of all positions. arrays: PATCHES and PATCH_PLACES, or TOWER_ROWS (`models.inputs`).
        """
        if self.sequence:
            places = places[self.shard * x.shape[0] : (self.shard + 1) * x.shape[0]]
        rows = self.tower(arrays[0], arrays[1]) if self.has_tower else arrays[0]
        own = ops.gather(rows.astype(x.dtype), ops.select(places > 0, places - 1, ops.zeros_like(places)), 0)
        return ops.select(expand(places.reshape((-1, 1)), x.shape) > 0, own, x)
