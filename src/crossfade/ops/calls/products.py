"""How rows are cut, alike on all ranks; products of them by torch (cuBLAS on a GPU), and collectives by torch.distributed.

Products run on the current stream. Collectives are of a peer group, under the names that this torch has for them: NCCL on GPUs,
gloo on a CPU. With ``is_async`` one runs beside what follows, on a stream or in a thread of torch's own, until ``wait`` of what it
gives; on a GPU that holds the current stream and not the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from crossfade.device.borrowed import torch_or_raise
from crossfade.errors import DeviceError

if TYPE_CHECKING:
    from torch import Tensor

    from crossfade.peers.group import PeerGroup

_TILE_ROWS = 128


def cut_evenly(length: int, num: int) -> list[tuple[int, int]]:
    """(begin, end) of ``num`` pieces of one length, the last of them shorter; none is empty, so there may be fewer."""
    if not length:
        return []
    step = -(-length // num)
    return [(begin, min(begin + step, length)) for begin in range(0, length, step)]


def fits(slot_bytes: int, row_bytes: int) -> bool:
    """Whether a slot takes a row."""
    return row_bytes <= slot_bytes


def least_rounds(slot_bytes: int, length: int, row_bytes: int) -> int:
    """In how many parts rows have to go, if one part is to fit into a slot."""
    if not row_bytes:
        return 1
    return max(-(-length // max(slot_bytes // row_bytes, 1)), 1)


def require_slot(slot_bytes: int, row_bytes: int, num_ranks: int) -> None:
    """Refuses rows that no number of rounds brings through."""
    if not fits(slot_bytes, row_bytes):
        raise DeviceError(
            f"a row of {row_bytes} bytes does not fit into a lane's slot of {slot_bytes} bytes",
            hint=f"open the group with buffer_bytes={row_bytes * num_ranks} or more, or take the candidate 'plain'",
        )


def shares(num: int, taper: int) -> list[int]:
    """Weights of ``num`` rounds, each ``taper`` times as long as the next one."""
    return [taper ** (num - 1 - number) for number in range(num)]


def in_order(num_rounds: int, lag: int) -> list[tuple[int, bool]]:
    """(round, whether it is the own rows') of each step of a sum, with own steps so many rounds late."""
    last = num_rounds - 1
    steps = [(number, is_own) for number in range(num_rounds) for is_own in (False, True)]
    return sorted(steps, key=lambda step: (min(step[0] + lag, last) if step[1] else step[0], step[1], step[0]))


def place(length: int, part: int, whole: int) -> int:
    """The row at ``part`` / ``whole`` of a length, between two tiles' rows where it is long enough for that."""
    at = length * part // whole
    if length < 2 * _TILE_ROWS * whole or part == whole:
        return at
    return round(at / _TILE_ROWS) * _TILE_ROWS


def multiply(a: Tensor, b: Tensor, out: Tensor, bias: Tensor | None) -> None:
    """``out`` (M, N) becomes ``a @ b + bias``."""
    torch = torch_or_raise()
    if not out.numel():
        return
    if bias is None:
        torch.mm(a, b, out=out)
    else:
        torch.addmm(bias, a, b, out=out)


def require_group(group: PeerGroup) -> Any:
    """torch's group of the same ranks."""
    process_group = group.process_group
    if process_group is None:
        raise DeviceError(
            "these ranks have no group of torch.distributed, or it is destroyed, and this candidate needs it",
            hint="take 'rounds'",
        )
    return process_group


def _named(*names: str) -> Any:
    """The first of these that there is: since 2.13 torch warns of the older names."""
    distributed = torch_or_raise().distributed
    return next(getattr(distributed, name) for name in names if hasattr(distributed, name))


def reduce_scatter(group: PeerGroup, out: Tensor, tensor: Tensor, *, is_async: bool = False) -> Any:
    """(W n, ...) to the sum's (n, ...)."""
    function = _named("reduce_scatter_single", "reduce_scatter_tensor")
    return function(out, tensor, group=require_group(group), async_op=is_async)


def all_reduce(group: PeerGroup, tensor: Tensor, *, is_async: bool = False) -> Any:
    """In place."""
    return torch_or_raise().distributed.all_reduce(tensor, group=require_group(group), async_op=is_async)


def all_gather(group: PeerGroup, out: Tensor, tensor: Tensor) -> None:
    """(n, ...) to (W n, ...)."""
    _named("all_gather_single", "all_gather_into_tensor")(out, tensor, group=require_group(group))


def all_to_all(group: PeerGroup, out: Tensor, tensor: Tensor, received: Sequence[int], sent: Sequence[int]) -> None:
    """Rows of the first dimension: ``sent[p]`` of them to rank p, ``received[p]`` from it."""
    torch_or_raise().distributed.all_to_all_single(out, tensor, list(received), list(sent), group=require_group(group))
