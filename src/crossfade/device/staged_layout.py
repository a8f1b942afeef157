"""How a value that goes through the host's memory is cut into chunks, and why so.

Letters: S bytes of the value, r rate of a link, g what each copy costs beside its bytes, c_i bytes of chunk i of n.

Chunk i takes t_i = c_i / r + g on its way up to the host, and as long on its way down. It comes down when it is up and the chunk
before it is down, so the value is there after ::

    max over i of (t_1 + ... + t_i) + (t_i + ... + t_n)   =   S / r  +  n g  +  max c_i / r  +  g

Only the number of chunks and the longest of them count, not where they stand: a ramp of short chunks at both ends adds copies and
takes nothing away, as long as both links are equally fast. So equal chunks are best, n = sqrt(S / (r g)) of them, and the value
takes about S / r + 2 sqrt(S g / r). For 64 MB, r = 55 GB/s, g = 3.5 us (S / r is 1220 us):

====================================  ==  =======  ======================
chunks                                n   time     of one pinned copy
====================================  ==  =======  ======================
equal (the default)                   19  1354 us  0.901
full ones of 3 MB                     22  1358 us  0.898
full ones of 4 MB                     16  1356 us  0.900
ramp 0.5, 1, 2, 4, ..., 4, 2, 1, 0.5  21  1373 us  0.889
====================================  ==  =======  ======================

To each comes the way of one signal and of the first call, 20 to 30 us as measured. Telling of several chunks by one signal makes
them one long chunk with several g in it, which is worse than a chunk of that length; only what goes *back* (``free``) can be told
more seldom at no cost. A ramp, which is not built, would pay where the links differ: with the second half as slow again, by what
the first chunk is shorter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import sqrt

from crossfade.device.signals import WORD_BYTES
from crossfade.host.memory import PAGE_BYTES, align


class Cut(StrEnum):
    """How a value is cut."""

    EQUAL = "equal"  # into chunks of one length, as many as cost least in all
    FULL = "full"  # into chunks as long as they may be, and a rest


@dataclass(frozen=True, slots=True)
class StagedLayout:
    """How the shared memory of one direction is used: two counters first, then the chunks. Both sides must have the same."""

    num_chunks: int = 8  # how many chunks can be on their way, at least 2
    chunk_bytes: int = 4 << 20  # the longest chunk, a multiple of the page size
    cut: Cut = Cut.EQUAL
    # After how many chunks the receiver says that they are free; None for half of them, which lets the sender continue without a
    # gap from 4 chunks on.
    chunks_per_free: int | None = None
    link_gbs: float = 55.0  # this and the next: r and g above, for `Cut.EQUAL`
    copy_us: float = 3.5

    def __post_init__(self) -> None:
        if self.num_chunks < 2 or self.chunk_bytes <= 0 or self.chunk_bytes % PAGE_BYTES:
            raise ValueError(
                f"{self.num_chunks} chunks of {self.chunk_bytes} bytes\nhint: at least 2 chunks of whole pages ({PAGE_BYTES} bytes)"
            )
        if not 1 <= self.free_every <= self.num_chunks:
            raise ValueError(
                f"{self.chunks_per_free} of {self.num_chunks} chunks are freed together\nhint: from 1 to all of them"
            )

    @property
    def free_every(self) -> int:
        """After how many chunks the receiver says that they are free."""
        return self.num_chunks // 2 if self.chunks_per_free is None else self.chunks_per_free

    @property
    def signal_bytes(self) -> int:
        """Where the chunks begin."""
        return align(2 * WORD_BYTES, PAGE_BYTES)

    @property
    def size_bytes(self) -> int:
        """All of it."""
        return self.signal_bytes + self.num_chunks * self.chunk_bytes

    def lengths(self, size_bytes: int) -> list[int]:
        """The chunks of a value, in order."""
        match self.cut:
            case Cut.EQUAL:
                num = max(round(sqrt(size_bytes / (self.link_gbs * 1e3 * self.copy_us))), 1)
                return _full(size_bytes, min(align(-(-size_bytes // num), PAGE_BYTES), self.chunk_bytes))
            case Cut.FULL:
                return _full(size_bytes, self.chunk_bytes)

    def __str__(self) -> str:
        best = f" for {self.copy_us:g} us a copy" if self.cut is Cut.EQUAL else ""
        return f"{self.num_chunks} {self.cut} chunks of {self.chunk_bytes >> 10} KB{best}, freed by {self.free_every}"


def _full(size_bytes: int, chunk_bytes: int) -> list[int]:
    num, rest = divmod(size_bytes, chunk_bytes) if size_bytes else (0, 0)
    return [chunk_bytes] * num + [rest] * bool(rest)


def pipeline_us(lengths: Sequence[int], up_gbs: float, down_gbs: float, copy_us: float) -> float:
    """When the last of these chunks is down, counted from the start of the first, without the way of the signals."""
    up = down = 0.0
    for length in lengths:
        up += length / (up_gbs * 1e3) + copy_us
        down = max(up, down) + length / (down_gbs * 1e3) + copy_us
    return down
