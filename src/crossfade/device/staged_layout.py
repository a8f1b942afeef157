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
equal, as many as here                19  1354 us  0.901
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

from dataclasses import dataclass
from math import sqrt

from crossfade.device.signals import WORD_BYTES
from crossfade.host.memory import PAGE_BYTES, align

_LINK_GBS, _COPY_US = 55.0, 3.5  # r and g


@dataclass(frozen=True, slots=True)
class StagedLayout:
    """How the shared memory of one direction is used: two counters first, then the chunks. Both sides must have the same."""

    num_chunks: int = 8  # how many chunks can be on their way, at least 2
    chunk_bytes: int = 4 << 20  # the longest chunk, a multiple of the page size

    def __post_init__(self) -> None:
        if self.num_chunks < 2 or self.chunk_bytes <= 0 or self.chunk_bytes % PAGE_BYTES:
            raise ValueError(
                f"{self.num_chunks} chunks of {self.chunk_bytes} bytes\nhint: at least 2 chunks of whole pages ({PAGE_BYTES} bytes)"
            )

    @property
    def free_every(self) -> int:
        """After how many chunks the receiver says that they are free: half of them let the sender continue without a gap from 4
        chunks on.
        """
        return self.num_chunks // 2

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
        num = max(round(sqrt(size_bytes / (_LINK_GBS * 1e3 * _COPY_US))), 1)
        longest = min(align(-(-size_bytes // num), PAGE_BYTES), self.chunk_bytes)
        num_whole, rest = divmod(size_bytes, longest) if size_bytes else (0, 0)
        return [longest] * num_whole + [rest] * bool(rest)
