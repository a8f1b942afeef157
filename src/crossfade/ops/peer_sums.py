"""Sums over ranks that read the other ranks' parts in their memory: by a Triton kernel on a GPU, by torch on a CPU.

Parts are added in the order of the ranks, those of 16 bits in float32, and the sum is rounded once: bit for bit
`crossfade.peers.sums`. To make one is set-up, since kernels are loaded; it is kept with its group, and any call may use it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from crossfade.device.borrowed import tensor_on, torch_or_raise
from crossfade.device.driver import HOST
from crossfade.ops.preparing import refuse_in_capture

if TYPE_CHECKING:
    import torch

    from crossfade.peers.group import PeerGroup

__all__ = ["ALL_SMS", "PeerSum", "peer_sum_of"]

ALL_SMS = 0
_KEPT_AS = "sums of peers"
_BLOCKS = {2: 16384, 4: 8192, 8: 4096}
"""Elements that a program adds at a time, by their bytes: 32 KB of every part, so that enough reads are under way."""
_NUM_WARPS = 16
_INTERPRETED = "TRITON_INTERPRET"


class PeerSum(Protocol):
    """A sum of one element type."""

    def launch(
        self,
        stream: int,
        target: int,
        own: int,
        count: int,
        source_offset: int = 0,
        also_offset: int = 0,
        num_programs: int = ALL_SMS,
    ) -> None:
        """See `crossfade.ops.launch.Sum.launch`; on a CPU it is done when this returns."""


class _Key(NamedTuple):
    """What a sum is made for.

    Attributes:
        kind: element type, as torch calls it.
        also: ranks into whose memory the sum goes besides.
    """

    kind: str
    also: tuple[int, ...]


def peer_sum_of(group: PeerGroup, dtype: torch.dtype, also: Sequence[int] = ()) -> PeerSum:
    """The one that is kept, or a new one.

    Args:
        group: whose memory it reads, at one offset for all ranks.
        dtype: of the elements.
        also: ranks into whose memory, at one offset, it writes besides.

    Raises:
        DeviceError: it would have to be made in a capture.
    """
    kept: dict[_Key, PeerSum] = group.belongings.setdefault(_KEPT_AS, {})
    key = _Key(str(dtype).removeprefix("torch."), tuple(also))
    if key not in kept:
        refuse_in_capture(group, "a sum of the ranks' parts has to load kernels")
        kept[key] = _make(group, key, dtype)
    return kept[key]


def _make(group: PeerGroup, key: _Key, dtype: torch.dtype) -> PeerSum:
    home = group.home
    # Triton's interpreter stands for the kernels on a CPU where it is asked for, as everywhere in a process.
    if home.driver.device == HOST and os.environ.get(_INTERPRETED) != "1":
        return _ByTorch(home.buffers, home.rank, dtype, [home.buffers[p] for p in key.also])
    from crossfade.ops.launch import Sum
    from crossfade.ops.loading import loader_of

    loader = loader_of(group)
    made = Sum(
        loader,
        key.kind,
        home.rank,
        home.buffers,
        also=[home.buffers[p] for p in key.also],
        num_programs=loader.num_sms,
        block=_BLOCKS[dtype.itemsize],
        num_warps=_NUM_WARPS,
    )
    made.load()
    return made


class _ByTorch:
    """CPU memory that processes share, added by torch.

    Args:
        sources: of each rank, where its memory lies here.
        rank: this one.
        dtype: of the elements.
        also: where further copies of the sum go.
    """

    def __init__(self, sources: Sequence[int], rank: int, dtype: torch.dtype, also: Sequence[int]) -> None:
        torch = torch_or_raise()
        self._sources, self._rank, self._dtype, self._also = list(sources), rank, dtype, list(also)
        self._wide = torch.float32 if dtype.itemsize == 2 else dtype

    def launch(
        self,
        stream: int,
        target: int,
        own: int,
        count: int,
        source_offset: int = 0,
        also_offset: int = 0,
        num_programs: int = ALL_SMS,
    ) -> None:
        """See `PeerSum`."""
        if not count:
            return
        places = [own if k == self._rank else each + source_offset for k, each in enumerate(self._sources)]
        first, *rest = (self._at(place, count) for place in places)
        total = first.to(self._wide, copy=True)
        for part in rest:
            total += part.to(self._wide)
        for place in (target, *(each + also_offset for each in self._also)):
            self._at(place, count).copy_(total)

    def _at(self, address: int, count: int) -> torch.Tensor:
        return tensor_on(address, (count,), self._dtype, HOST)
