"""How rows are cut, alike on all ranks; and products of them by torch (cuBLAS on a GPU), on torch's current stream."""

from __future__ import annotations

from typing import TYPE_CHECKING

from crossfade.device.borrowed import torch_or_raise
from crossfade.errors import DeviceError

if TYPE_CHECKING:
    from torch import Tensor

    from crossfade.ops.calls.job import Job

__all__ = [
    "cut_evenly",
    "fits",
    "in_order",
    "least_rounds",
    "multiply",
    "multiply_rows",
    "place",
    "require_slot",
    "shares",
]

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


def multiply_rows(job: Job, a: Tensor, out: Tensor) -> None:
    """``out`` becomes the product of these rows of the job; on a CPU in its place in a captured graph."""
    if out.numel():
        job.group.do(lambda: multiply(a, job.b, out, job.bias))
