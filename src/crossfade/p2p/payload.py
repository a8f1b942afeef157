"""What can be sent, and to whom; tensors for what comes."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from functools import cache
from operator import index
from typing import TYPE_CHECKING, Any, TypeVar

from crossfade.device.borrowed import device_of, torch_or_raise
from crossfade.errors import DeviceError
from crossfade.p2p.letters import MOST_DIMS, Announced

if TYPE_CHECKING:
    import torch

_NAMES = (
    "uint8 int8 int16 int32 int64 float16 bfloat16 float32 float64 bool complex64 complex128 complex32 float8_e4m3fn float8_e5m2 "
    "float8_e4m3fnuz float8_e5m2fnuz uint16 uint32 uint64"
)


class Transport(StrEnum):
    """What a communicator is asked to move values by. Between hosts it is always the last one."""

    AUTO = "auto"
    COPY = "copy"
    STAGED = "staged"
    TCP = "tcp"


class Waits(StrEnum):
    """What keeps still until a posted receive's send has begun: the host that waits for it, or its stream."""

    HOST = "host"
    STREAM = "stream"


_MOST_TAG = 1 << 62


@cache
def _dtypes() -> list[Any]:
    return [getattr(torch_or_raise(), name, None) for name in _NAMES.split()]


@cache
def _numbers() -> dict[Any, int]:
    return {dtype: number for number, dtype in enumerate(_dtypes()) if dtype is not None}


def number_of(dtype: torch.dtype) -> int:
    """The number by which ranks know a type."""
    return _numbers()[dtype]


def empty(value: Announced, device: int) -> torch.Tensor:
    """A tensor for an announced value, on a device's index or `HOST`."""
    made: torch.Tensor = torch_or_raise().empty(value.shape, dtype=_dtypes()[value.dtype], device=device_of(device))
    return made


Option = TypeVar("Option", bound=StrEnum)


def choose(options: type[Option], name: str, asked: str) -> Option:
    """What a communicator was asked for by name. Raises a `ValueError` for what is none of the options."""
    try:
        return options(asked)
    except ValueError:
        raise ValueError(f"{name} is {asked!r}\nhint: it is one of {', '.join(options)}") from None


def check_tensor(tensor: Any, call: str) -> None:
    """Raises a `TypeError` or a `ValueError` for what cannot be sent or received."""
    torch = torch_or_raise()
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{call} was given a {type(tensor).__name__}\nhint: it takes one torch tensor")
    if tensor.layout is not torch.strided or tensor.dtype not in _numbers():
        raise TypeError(
            f"{call} was given a {tensor.layout} tensor of {tensor.dtype}\nhint: it takes dense tensors of numbers"
        )
    if tensor.is_conj() or tensor.is_neg():
        raise ValueError(
            f"{call} was given a conjugate or negative view\nhint: resolve_conj() or resolve_neg() makes it a tensor"
        )
    if not (tensor.is_cpu or tensor.is_cuda):  # to ask for its device's type takes ten times as long
        raise TypeError(
            f"{call} was given a tensor on {tensor.device}\nhint: it takes tensors on the CPU or on a CUDA device"
        )
    if tensor.dim() > MOST_DIMS:
        raise ValueError(
            f"{call} was given a tensor of {tensor.dim()} dimensions\nhint: flatten it; {MOST_DIMS} are possible"
        )


def check_ranks(call: str, ranks: Sequence[int], tag: int, num_ranks: int) -> tuple[list[int], int]:
    """Ranks and a tag as Python's own integers, which numpy's for one are not. Raises a `TypeError` where there is another thing,
    and a `ValueError` for other ranks than those of the group, and for what is no tag.
    """
    try:
        ranks, tag = [index(rank) for rank in ranks], index(tag)
    except TypeError:
        text = f"{call} was given the ranks {list(ranks)} and the tag {tag!r}\nhint: ranks and tags are integers"
        raise TypeError(text) from None
    if not ranks or len(set(ranks)) < len(ranks) or min(ranks) < 0 or max(ranks) >= num_ranks:
        text = (
            f"{call} was given {ranks} as ranks\nhint: the ranks are 0 to {num_ranks - 1}, and each can be named once"
        )
        raise ValueError(text)
    if not -_MOST_TAG <= tag <= _MOST_TAG:
        raise ValueError(f"{call} was given the tag {tag}\nhint: tags are integers from -2^62 to 2^62")
    return ranks, tag


def check_capture(call: str, *, is_host: bool) -> None:
    """Refuses a call whose transfer would become a part of a CUDA graph (DeviceError)."""
    if not is_host and torch_or_raise().cuda.is_current_stream_capturing():
        raise DeviceError(f"{call} cannot be captured into a CUDA graph", hint="call it before or after the capture")
