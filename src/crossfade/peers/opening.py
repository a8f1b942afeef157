"""Opening a group: its arguments, its memory, its lanes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from crossfade.device.borrowed import torch_or_raise
from crossfade.errors import DeviceError
from crossfade.host.memory import align
from crossfade.peers.group import NUM_EACH, PeerGroup
from crossfade.peers.lane import NUM_EPOCHS, SLOT_ALIGNMENT, Lane, num_words
from crossfade.peers.memory import OpenedGroup
from crossfade.peers.rendezvous import agree, count_off

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

_MOST_BYTES = 1 << 48
_CUT_BYTES = 1 << 20


def open_group(
    process_group: ProcessGroup | None = None,
    *,
    device: torch.device | str | None = None,
    buffer_bytes: int = 64 << 20,
    num_lanes: int = 1,
    heap_bytes: int = 0,
    is_replayable: bool = False,
    timeout_s: float = 60.0,
    is_staged: bool = False,
) -> PeerGroup:
    """Opens what the ranks of a torch.distributed group share. All ranks call it, with equal arguments.

    Args:
        process_group: all of one host; None for the default group.
        device: this rank's GPU, or ``"cpu"``; None for torch's current GPU where there is one.
        buffer_bytes: of each of the two buffers that a lane has on each rank. Longer tensors are done in pieces; an all-reduce of
            n bytes takes one piece if a buffer has n bytes, an all-gather if it has a rank's share.
        num_lanes: collectives that may be in flight at the same time.
        heap_bytes: memory on each rank for `PeerGroup.empty`.
        is_replayable: collectives may be captured into graphs; those by themselves take one more exchange of signals.
        timeout_s: CPU only: the longest that a call waits for the others. (A GPU's wait ends only when a rank dies.)
        is_staged: buffers lie in pinned memory of the host, for GPUs that do not reach each other. Tensors of 1 MB and more go in
            several pieces, and a sum's buffers are two halves. There is no heap, and operators of `crossfade.ops` leave the
            collective to torch.distributed.

    Raises:
        DeviceError: the machine or the group does not allow it.
        ValueError: an argument makes no sense, or the ranks' arguments differ.
    """
    torch = torch_or_raise()
    group = torch.distributed.group.WORLD if process_group is None else process_group
    if group is None:
        raise DeviceError("there is no process group", hint="call torch.distributed.init_process_group first")
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    where = torch.device(device)
    if torch.distributed.get_rank(group) < 0:
        raise DeviceError("this process is not in the group", hint="only the ranks of a group open it")
    num_ranks = torch.distributed.get_world_size(group)
    least_bytes = SLOT_ALIGNMENT * num_ranks
    if buffer_bytes < least_bytes or num_lanes < 1:
        raise ValueError(
            f"buffer_bytes is {buffer_bytes}, and num_lanes {num_lanes}\nhint: at least {least_bytes} bytes, and 1 lane"
        )
    if heap_bytes < 0 or max(buffer_bytes, heap_bytes) >= _MOST_BYTES:
        raise ValueError(
            f"buffer_bytes is {buffer_bytes} and heap_bytes {heap_bytes}\nhint: no GPU has so much, or so little"
        )
    if is_staged and heap_bytes:
        raise ValueError(f"heap_bytes is {heap_bytes}\nhint: a staged group's memory is the host's, and has no heap")
    if not timeout_s > 0:
        raise ValueError(f"timeout_s is {timeout_s}\nhint: it is seconds, more than 0")
    if where.type in ("cpu", "cuda"):
        agree(
            group,
            where,
            buffer_bytes=buffer_bytes,
            num_lanes=num_lanes,
            is_replayable=is_replayable,
            heap_bytes=heap_bytes,
            is_staged=is_staged,
        )
    number = count_off(group, where) if where.type in ("cpu", "cuda") else 0
    options: dict[str, Any] = {"is_replayable": is_replayable}
    if is_staged:
        num_lanes, buffer_bytes = num_lanes * NUM_EACH, buffer_bytes // NUM_EACH
        options["cut_bytes"] = _CUT_BYTES
    buffer_bytes = align(buffer_bytes, least_bytes)
    words, total_bytes = num_words(num_lanes, num_ranks), NUM_EPOCHS * num_lanes * buffer_bytes
    heap_bytes = align(heap_bytes, SLOT_ALIGNMENT)
    opened = _open_memory(group, where, words, total_bytes + heap_bytes, timeout_s, is_staged=is_staged)
    lanes = [Lane(opened.memory, index, buffer_bytes, **options) for index in range(num_lanes)]
    return PeerGroup(opened, lanes, where.type, total_bytes, process_group=group, number=number, is_staged=is_staged)


def _open_memory(
    group: ProcessGroup, device: torch.device, words: int, total_bytes: int, timeout_s: float, *, is_staged: bool
) -> OpenedGroup:
    if is_staged and device.type in ("cpu", "cuda"):
        from crossfade.peers.staged_memory import open_staged_memory

        return open_staged_memory(group, device, words, total_bytes, timeout_s)
    if device.type == "cpu":
        from crossfade.peers.host_memory import open_host_memory

        return open_host_memory(group, words, total_bytes, timeout_s)
    if device.type == "cuda":
        from crossfade.peers.cuda_memory import open_cuda_memory

        return open_cuda_memory(group, device, words, total_bytes)
    raise DeviceError(f"there are no collectives for device '{device}'", hint="take a CUDA device or 'cpu'")
