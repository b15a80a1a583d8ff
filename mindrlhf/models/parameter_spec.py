"""Row of the parameter table: cuts over ranks, and tensors in Hugging Face's checkpoints.

Imports no family.
"""

from dataclasses import dataclass
from math import prod
from typing import Literal

from mindrlhf.models.axes import Axis

Kind = Literal["matrix", "bias", "norm", "embedding", "head", "router", "fixed", "lora_a", "lora_b"]
Place = int | Literal["first", "last", "ends"]


@dataclass(frozen=True)
class Cut:
    """Cut of a parameter by a mesh axis.

    dim: the dimension that is cut. parts: the largest number of parts; with more ranks than parts, several ranks hold
    the same part. None is no limit.
    """

    axis: Axis
    dim: int
    parts: int | None = None


@dataclass(frozen=True)
class View:
    """Numbers of a stored tensor that are another one.

    dims: the stored shape, of which a dimension may be several here. box: (start, stop) in each of `dims`. order: of
    the dimensions, as NumPy's `transpose` takes it; () keeps them. The other tensor's shape follows.
    """

    dims: tuple[int, ...]
    box: tuple[tuple[int, int], ...]
    order: tuple[int, ...] = ()


@dataclass(frozen=True)
class HfTensor:
    """Tensor of a Hugging Face checkpoint that holds one box of a parameter.

    box: (start, stop) in each dimension of the parameter. shape: of the tensor, without the box's leading dimensions of
    size 1 if the parameter is a stack of tensors. view: the place of the box's numbers in a tensor that holds others
    too, or has another order.
    """

    name: str
    box: tuple[tuple[int, int], ...]
    shape: tuple[int, ...]
    view: View | None = None

    @property
    def module(self) -> str:
        """Path of the tensor's module in a Hugging Face model."""
        return self.name.rpartition(".lora_")[0] or self.name.rpartition(".")[0]


@dataclass(frozen=True)
class ParameterSpec:
    """Parameter of the full, unsharded model.

    name: the name in MindFormers' `LlamaForCausalLM`, which is also ours.
    hf_name: the name in a Hugging Face checkpoint, of a parameter that is one tensor there.
    shape: the full shape; linear weights are [out, in] in both worlds.
    kind: decides weight decay and the initial values. A "fixed" one's gradient is 0, so that updates do not change it.
    place: index of the decoder layer; else the first or the last pipeline stage, or both (`ends`: a tied embedding).
    cuts: at most one for each mesh axis; without cuts every rank of a stage holds the whole parameter.
    inside: used inside the parallel region of `tp`, where each rank computes a part of the gradient.
    trains: whether updates change it.
    scale: factor of the product of an adapter's two matrices.
    pieces: the tensors of a Hugging Face checkpoint, if they are several.
    joint: the same in checkpoints that store these pieces together, if there are any; they are read and not written.
    """

    name: str
    hf_name: str
    shape: tuple[int, ...]
    kind: Kind
    place: Place
    cuts: tuple[Cut, ...] = ()
    inside: bool = True
    trains: bool = True
    scale: float = 1.0
    pieces: tuple[HfTensor, ...] = ()
    joint: tuple[HfTensor, ...] = ()

    @property
    def layer(self) -> int | None:
        """Index of the decoder layer; None outside of the layers."""
        return self.place if isinstance(self.place, int) else None

    @property
    def decays(self) -> bool:
        """True if weight decay applies: for matrices, routers and an untied head.

        It does not apply to biases, norms and embeddings.
        """
        return self.kind in ("matrix", "router", "head") or self.adapts

    def is_cut(self, dim: int) -> bool:
        """Test if ranks hold parts of a dimension."""
        return any(cut.dim == dim for cut in self.cuts)

    @property
    def adapts(self) -> bool:
        """True for a matrix of an adapter."""
        return self.kind in ("lora_a", "lora_b")

    @property
    def hf_tensors(self) -> tuple[HfTensor, ...]:
        """The tensors of a Hugging Face checkpoint, which hold every element once."""
        return self.pieces or (self.as_tensor(self.hf_name),)

    def as_tensor(self, name: str) -> HfTensor:
        """Describe one tensor with the whole parameter."""
        return HfTensor(name, tuple((0, size) for size in self.shape), self.shape)

    @property
    def size(self) -> int:
        """Number of elements of the full parameter."""
        return prod(self.shape)
