"""The root of a compiled graph."""

from mindspore import nn


class Graph(nn.Cell):
    """A Cell that is called by itself, and often: every decode step, every micro-batch.

    At each call MindSpore writes the name of the compiled graph (`compile_phase`) into all cells below, which only its
    automatic parallelism reads: two milliseconds for a model of four layers. Here it stays at the root.
    """

    def __init__(self):
        super().__init__(auto_prefix=False)

    @property
    def compile_phase(self):
        return self._compile_phase

    @compile_phase.setter
    def compile_phase(self, value):
        self._compile_phase = value
