"""Memory of a device besides arrays: buffers of groups, and gaps in its pool."""

from collections.abc import Mapping, Sequence

from mindrlhf.backend.device import Device
from mindrlhf.models.axes import DATA_AXES, MODEL_AXES, PIPELINE, TENSOR
from mindrlhf.parallel.partition import Group, Partition


def device_extra(device: Device, groups: set[Group], held: int) -> dict[str, int]:
    """Compute the bytes by their names; none in the host's memory.

    groups: of a rank. held: most bytes of arrays.
    """
    found = {
        f"buffers of {device.collectives}": device.communicator_bytes() * len(groups),
        f"gaps, {device.fragmentation:.0%} assumed": int(device.fragmentation * held),
    }
    return {name: nbytes for name, nbytes in found.items() if nbytes}


def rank_groups(ranks: Sequence[int], layouts: Sequence[Mapping[int, Partition]], rank: int) -> set[Group]:
    """List the groups of several ranks that a rank is in.

    One is of all ranks. layouts: parts of the model by rank.
    """
    found = {tuple(ranks)}
    for parts in layouts:
        if rank in parts:
            mesh = parts[rank].mesh
            found |= {mesh.group(rank, *axes) for axes in (DATA_AXES, MODEL_AXES, (TENSOR,), (PIPELINE,))}
    return {group for group in found if len(group) > 1}
