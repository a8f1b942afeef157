"""What collectives may be given, and what they say when it is something else."""

from __future__ import annotations

from typing import TYPE_CHECKING

from crossfade.device.borrowed import torch_or_raise
from crossfade.peers.memory import Kind

if TYPE_CHECKING:
    from torch import Tensor

    from crossfade.peers.group import PeerGroup

SUMMABLE = ("bfloat16", "float16", "float32", "float64", "int32", "int64")
"""Element types that can be summed; all types can be moved."""


def check_tensor(group: PeerGroup, what: str, tensor: Tensor) -> None:
    """Refuses what is no plain tensor on the group's device."""
    torch = torch_or_raise()
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{what} is a {type(tensor).__name__}\nhint: give a torch tensor")
    index = group.memory.driver.device
    if tensor.device.type != group.device_type or (group.device_type == "cuda" and tensor.device.index != index):
        own = "cpu" if group.device_type == "cpu" else f"cuda:{index}"
        raise ValueError(f"{what} is on {tensor.device}, and the group's device is {own}\nhint: tensor.to('{own}')")
    if tensor.layout is not torch.strided or tensor.is_conj() or tensor.is_neg():
        raise ValueError(f"{what} is not a plain strided tensor\nhint: to_dense(), resolve_conj() or resolve_neg()")
    if tensor.requires_grad and torch.is_grad_enabled():
        raise ValueError(f"{what} requires grad, and collectives have no gradient\nhint: detach() it")


def check_overlap(name: str, tensor: Tensor, out: Tensor, place: int | None) -> None:
    """What is packed first may overlap; else one block would be written over another that is still to be read."""
    if not (tensor.is_contiguous() and out.is_contiguous()):
        return
    distance = out.data_ptr() - tensor.data_ptr()
    is_apart = distance >= tensor.numel() * tensor.itemsize or -distance >= out.numel() * out.itemsize
    if not is_apart and distance != place:
        what = "cannot write into its input" if place is None else "can only write into its input in place"
        raise ValueError(f"{name} {what}\nhint: give another tensor as out, or none")


def extent_of(tensor: Tensor) -> tuple[int, int]:
    """The addresses of the first byte of a contiguous tensor and behind its last one."""
    return tensor.data_ptr(), tensor.data_ptr() + tensor.numel() * tensor.itemsize


def kind_of(name: str, tensor: Tensor) -> Kind:
    """The type of a tensor that can be summed."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in SUMMABLE:
        raise TypeError(f"{name} cannot sum tensors of {tensor.dtype}\nhint: one of {', '.join(SUMMABLE)}")
    return Kind(dtype, tensor.itemsize)


def part_length(group: PeerGroup, name: str, tensor: Tensor) -> int:
    """The length of one rank's part of the first dimension."""
    length = tensor.shape[0] if tensor.dim() else 0
    if not tensor.dim() or length % group.num_ranks:
        raise ValueError(
            f"the input of {name} is {describe(tensor)}\nhint: its first dimension has to be a multiple of the number of ranks, "
            f"{group.num_ranks}"
        )
    return length // group.num_ranks


def packed(group: PeerGroup, tensor: Tensor) -> Tensor:
    """Contiguous; a copy of it where it must be, made in its place among what the current stream does."""
    if tensor.is_contiguous():
        return tensor
    made = tensor.new_empty(tensor.shape)
    group.do(lambda: made.copy_(tensor))
    return made


def describe(tensor: Tensor) -> str:
    """Type and shape, for errors."""
    return f"{tensor.dtype} of shape {list(tensor.shape)}"
