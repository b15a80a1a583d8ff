"""Sizes of a process on CPU and of its compiled graphs, in bytes."""

from mindrlhf.units import MIB

# Measured with MindSpore 2.9 on CPU: Python with all imports; compiled graphs: the first one, and per layer.
PROCESS = 445 * MIB
FUSED_GRAPHS = {"first": 78 * MIB, "generate": 2 * MIB, "score": 2 * MIB, "update": 4 * MIB}
COMPOSED_GRAPHS = {"first": 145 * MIB, "generate": 16 * MIB, "score": 8 * MIB, "update": 46 * MIB}
TOKENIZER_ROW = 600  # bytes of a token in the tokenizer's tables
# Of a vision tower's graph: itself, and for each block without gradients and with them.
TOWER_GRAPH = 45 * MIB
TOWER_BLOCKS = {False: 2 * MIB, True: 9 * MIB}
# The same of a fused tower, whose blocks cost as much in either.
FUSED_TOWER_GRAPH = {False: 37 * MIB, True: 74 * MIB}
FUSED_TOWER_BLOCK = 1.35 * MIB
