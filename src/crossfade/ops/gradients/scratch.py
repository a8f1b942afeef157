"""Memory that the other ranks write, for rows that a gradient gathers and needs only until its product is done.

Rows that copy engines bring into a lane's slots cost a copy by a kernel to keep; rows for memory of `PeerGroup.empty` are put
there at once. One such piece for each lane is enough, since a lane's calls come one behind the other.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

from crossfade.device.borrowed import torch_or_raise
from crossfade.peers.groups import group_of

if TYPE_CHECKING:
    import torch

    from crossfade.peers.group import PeerGroup
    from crossfade.peers.groups import GroupLike

__all__ = ["find_scratch", "reserve_scratch"]


def reserve_scratch(group: GroupLike, size_bytes: int, lane: int = 0) -> None:
    """Sets a piece of the group's heap apart for the gradients of a lane's calls. All ranks call it, in one order with `empty`.

    Args:
        group: opened with ``heap_bytes`` for it.
        size_bytes: of the largest gathered rows: M times N of a `matmul_reduce_scatter`, or W M times K of an `all_gather_matmul`
            that gathers again. Longer ones, and those of other lanes, are gathered through slots.
        lane: which lane of the group.

    Raises:
        ChannelClosed: the group is closed.
        DeviceError: the heap is used up.
        ValueError: there is no such lane.
    """
    group = group_of(group)
    group.lane(lane)
    group.belongings[_name(lane)] = group.empty(size_bytes, dtype=torch_or_raise().uint8)


def find_scratch(group: PeerGroup, lane: int, shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
    """Reserved memory for rows of this shape, where there is enough, or new memory. To be used before the lane's next call only."""
    piece: torch.Tensor | None = group.belongings.get(_name(lane))
    size_bytes = prod(shape) * like.itemsize
    if piece is None or piece.numel() < size_bytes or not size_bytes:
        return like.new_empty(shape)
    return piece[:size_bytes].view(like.dtype).view(shape)


def _name(lane: int) -> str:
    return f"crossfade.ops.gradients.scratch of lane {lane}"
