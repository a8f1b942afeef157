"""The counters of a plan's pieces: who adds, who waits, and for which number.

A kernel adds 1 for each tile that it has stored. There are two rows of counters, since an eager call and a replay cannot share one:

- *eager* counters count up and are never reset. A launch is noted here, so the number to wait for is known: so many launches, times
  the piece's tiles. A wait is one operation, and numbers may wrap around 2^32.
- *replayed* counters begin at 0 and are put back to 0 by the wait, since a captured graph repeats its numbers. So a piece that is
  counted in a capture is waited for in it, once, and what launches it again comes behind that wait: a capture's streams are joined.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from crossfade.device.driver import Driver
from crossfade.errors import DeviceError
from crossfade.ops.signaled.tiles import COUNTER_WORDS, Piece, TilePlan

if TYPE_CHECKING:
    import torch

_MASK = 0xFFFF_FFFF
_STEP_BYTES = 4 * COUNTER_WORDS


def num_counter_words(plan: TilePlan) -> int:
    """int32 words of both rows."""
    return max(2 * len(plan.pieces) * COUNTER_WORDS, 1)


class Counters:
    """The counters of one plan, for one call in flight at a time: zeroed int32 ``words`` on the device, `num_counter_words` of
    them.
    """

    def __init__(self, driver: Driver, plan: TilePlan, words: torch.Tensor) -> None:
        self._driver = driver
        self._words = words  # kept alive
        self._rows = words.data_ptr(), words.data_ptr() + len(plan.pieces) * _STEP_BYTES
        self._num_launches = 0
        for row, name in zip(self._rows, ("eager", "replayed"), strict=True):
            for piece in plan.pieces:
                driver.name_range(row + piece.counter * _STEP_BYTES, 4, f"{name} counter of piece {piece.counter}")

    def row(self, *, is_captured: bool) -> int:
        """Where the kernel finds them."""
        return self._rows[is_captured]

    def note(self, *, is_captured: bool) -> None:
        """The product has been launched, and counts its pieces."""
        if not is_captured:
            self._num_launches += 1

    def wait(self, stream: int, piece: Piece, *, is_captured: bool) -> None:
        """Enqueues: behind it on the stream, the piece is stored. The product must have been launched before (PL-5)."""
        at = self._rows[is_captured] + piece.counter * _STEP_BYTES
        if is_captured:
            self._driver.wait_and_reset(stream, at, piece.num_tiles, 0)
            return
        if not self._num_launches:
            raise DeviceError(
                f"piece {piece.counter} is waited for before it is launched",
                hint="launch the product first: a stream must not wait for what is not enqueued",
            )
        self._driver.wait_value(stream, at, self._num_launches * piece.num_tiles & _MASK)
