"""Pools of activations of a rank, and what else is in a process on CPU. Pure Python."""

from typing import TYPE_CHECKING

from mindrlhf.memory import activations
from mindrlhf.units import MIB

if TYPE_CHECKING:  # it imports this
    from mindrlhf.memory.estimate import Pass, Work

# Measured with MindSpore 2.9 on CPU: Python with all imports; compiled graphs: the first one, and per layer.
PROCESS = 445 * MIB
FUSED_GRAPHS = {"first": 78 * MIB, "generate": 2 * MIB, "score": 2 * MIB, "update": 4 * MIB}
COMPOSED_GRAPHS = {"first": 145 * MIB, "generate": 16 * MIB, "score": 8 * MIB, "update": 46 * MIB}
TOKENIZER_ROW = 600  # bytes of a token in the tokenizer's tables
TOWER_GRAPHS = {False: 1 * MIB, True: 9 * MIB}  # of a block of a vision tower, without gradients and with them


def pool_bytes(work: "Work", rank: int) -> dict[str, int]:
    """Compute the peak bytes of activations on a rank in each phase."""
    found: dict[str, int] = {}
    for one in work.passes_of(rank):
        found[one.phase] = max(found.get(one.phase, 0), _peak(work, rank, one))
    return found


def _peak(work: "Work", rank: int, one: "Pass") -> int:
    """Compute the peak bytes of activations of a model's pass."""
    phase, name, kind = one
    stage = work.stage(name, rank, kind == "update")
    tower = work.tower(rank, one)
    if kind == "update":
        in_flight = work.train.parallel.pipeline_stage - work.trains[rank].coordinates.pp
        text = activations.update_bytes(stage, work.micro_batches(kind, name)[0], in_flight)
        return tower.update_bytes(text) if tower else text
    if kind == "score":
        text = activations.score_bytes(stage, work.micro_batches(kind, name)[0])
    else:
        text = max(activations.generate_bytes(stage, engine) for engine in work.engines(phase, name))
    return tower.pass_bytes(text) if tower else text


def process_bytes(work: "Work", rank: int) -> int:
    """Compute bytes of a process: itself, its tokenizer, graphs, operators' tables, arrays of pictures."""
    graphs = (FUSED_GRAPHS if work.fused else COMPOSED_GRAPHS)["first"]
    arrays = 0
    for one in work.passes_of(rank):
        _, name, kind = one
        stage = work.stage(name, rank, kind == "update")
        graphs += (FUSED_GRAPHS if stage.fused else COMPOSED_GRAPHS)[kind] * stage.layers
        micro = work.micro_batches(kind, name) if kind == "update" else ()
        graphs += activations.update_tables(stage, micro[0]) if micro else 0
        if tower := work.tower(rank, one):
            graphs += TOWER_GRAPHS[bool(micro) and tower.goes_back] * tower.model.vision.depth
            graphs += tower.table_bytes if micro else 0
            arrays = max(arrays, max(1, len(micro)) * tower.array_bytes)
    return PROCESS + TOKENIZER_ROW * work.model.vocab_size + graphs + arrays
