"""Record of a device: facts that other packages read, and its operators."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

from mindrlhf.errors import UserError

if TYPE_CHECKING:
    from mindrlhf.backend.operators import Operators

SOCKETS = "sockets"  # collectives over the job's own sockets (`comm.tcp`)


class DeviceOptions(Protocol):
    """Options of a device: the group `context` of a model YAML."""

    device_id: int | None
    max_device_memory: str | None
    jit_level: str | None


@dataclass(frozen=True)
class Chip:
    """Figures of a device with memory of its own.

    gib: memory, GiB. flops: highest rate of matrix products in bfloat16, or in float16 without bfloat16, FLOP/s.
    memory_rate: of its memory, bytes/s. link_rate: to another chip of its host, in one direction, bytes/s.
    """

    gib: float
    flops: float
    memory_rate: float
    link_rate: float


@dataclass(frozen=True)
class AttentionLimits:
    """Limits of a device's attention operators.

    head_dim_multiple: divides the size of a head. most_head_dim: largest size of a head; None is any. scoreless: dtypes
    of activations whose scores never exist as a matrix, without `ModelOperators` too.
    """

    head_dim_multiple: int = 2
    most_head_dim: int | None = None
    scoreless: tuple[str, ...] = ()


@dataclass(frozen=True)
class Device:
    """One `context.device_target`.

    A new device is a subclass with its record, an entry in `devices.DEVICES`, and a word in
    `configs.base.DeviceTarget`.

    name: the device_target. in_host_memory: parameters are in the process's own memory, and NumPy arrays are views of
    them; graphs share the host's memory with the process. swap: medium for parameters that are not needed (`memory`).
    collectives: `SOCKETS`, or MindSpore's name of the library. product_dtypes: input dtypes of matrix products.
    activation_dtype: dtype of the arrays between operators; None is that of products. ceiling_size: rows and columns of
    a matrix product at full speed. context_keys: keys of a model YAML's `context` that have an effect. default_dtypes:
    role of a model YAML -> keys of `model_config` without a file. chips: figures by name, of devices with memory of
    their own. default_chip: the chip that is assumed. fragmentation: share of what is held that its pool loses,
    assumed.
    """

    name: str
    in_host_memory: bool
    swap: Literal["file", "host"]
    collectives: str
    product_dtypes: tuple[str, ...]
    activation_dtype: str | None
    ceiling_size: int
    attention: AttentionLimits = AttentionLimits()
    context_keys: tuple[str, ...] = ()
    default_dtypes: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    chips: Mapping[str, Chip] = field(default_factory=dict)
    default_chip: str = ""
    fragmentation: float = 0.0

    def activations(self, dtype: str) -> str:
        """Return the dtype of activations for products of `dtype`."""
        return self.activation_dtype or dtype

    def operators(self, dtype: str = "float32", weights: str = "train") -> "Operators":
        """Return the operators that graphs are built from.

        dtype: input dtype of matrix products (`product_dtype`). weights: dtype in decode steps, or train
        (`check_weights`).
        """
        raise NotImplementedError

    def fused_problem(self) -> str:
        """Explain why `operators` has no `ModelOperators`; empty if it has. Imports no MindSpore."""
        return f"{self.name} has no products of packed weights"

    def describe_operators(self) -> str:
        """Describe `operators` in a message."""
        return "MindSpore's fused ones"

    def is_attached(self) -> bool:
        """Test if this host has the device; imports neither NumPy nor MindSpore."""
        raise NotImplementedError

    def check_usable(self) -> None:
        """Raise UserError if MindSpore cannot use the device here."""

    def configure(self, options: DeviceOptions) -> None:
        """Set MindSpore's options of the device."""

    def check_weights(self, weights: str) -> None:
        """Check that decode steps support `rollout.weights` here. Raises UserError."""
        if weights != "train" and (problem := self.fused_problem()):
            raise UserError(
                f"rollout.weights is {weights}, which takes the CPU's fused operators ({problem}); set train."
            )

    def communicator_bytes(self) -> int:
        """Return the bytes that a group of ranks takes on each device."""
        return 0

    def product_dtype(self, dtype: str) -> str:
        """Choose the dtype of matrix products; `auto` is bfloat16 if that is fast.

        Raises UserError if the device has no fast products of this dtype.
        """
        return "bfloat16" if dtype == "auto" else dtype
