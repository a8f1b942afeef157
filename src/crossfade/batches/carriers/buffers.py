"""The shared buffers through which copy engines move tensors of parts: opened when first needed, and shared by all handles.

They live as `crossfade.peers` has it for groups that calls open: `crossfade.peers.close_groups` closes them too.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from crossfade.errors import DeviceError
from crossfade.peers import PeerGroup, open_group
from crossfade.peers.groups import keep

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

BUFFER_BYTES, LARGE_BUFFER_BYTES = 64 << 20, 128 << 20
"""Of each of a lane's buffers; the larger ones are for tensors that need them. A sum in two pieces waits twice for multiprocessors:
with four H200, a prefill whose sums are of 84 MB took 68.6 ms so, and 66.8 ms with one piece each."""


class _Opened(NamedTuple):
    peers: PeerGroup
    is_large: bool  # it serves large tensors; where larger buffers do not fit, the small ones serve them too


_OPENED: list[_Opened] = []


def open_buffers(group: ProcessGroup, device: torch.device, num_parts: int, size_bytes: int = 0) -> PeerGroup:
    """The buffers of a process group for tensors of such a length, with a lane a part. Collective when they are made.

    Raises:
        DeviceError: they cannot be made, on all ranks.
    """
    is_large = size_bytes > BUFFER_BYTES and device.type == "cuda"
    for opened in _OPENED:
        peers = opened.peers
        if peers.is_of(group) and peers.num_lanes == num_parts and opened.is_large == is_large and not peers.is_closed:
            return peers
    peers = _open(group, device, num_parts, is_large=is_large)
    keep(peers)
    _OPENED[:] = [*(opened for opened in _OPENED if not opened.peers.is_closed), _Opened(peers, is_large)]
    return peers


def _open(group: ProcessGroup, device: torch.device, num_parts: int, *, is_large: bool) -> PeerGroup:
    is_staged = device.type == "cuda" and not can_reach()
    if is_large and is_staged:  # what goes over the host's memory is cut into pieces in any case
        return open_buffers(group, device, num_parts)
    options: dict[str, Any] = {"num_lanes": num_parts, "is_replayable": True, "is_staged": is_staged}
    if is_large:
        with suppress(DeviceError):  # then it is one on all ranks, of which some may have the memory
            return open_group(group, device=device, buffer_bytes=LARGE_BUFFER_BYTES, **options)
        return open_buffers(group, device, num_parts)
    return open_group(group, device=device, buffer_bytes=BUFFER_BYTES, **options)


def can_reach() -> bool:
    """Whether the GPUs of this host reach each other; else copies go through its memory. The same on all ranks."""
    from crossfade.peers.cuda_memory import check_machine

    try:
        check_machine()
    except DeviceError:
        return False
    return True
