"""A rank's pairs with all ranks, and what any of its threads does for them."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence

from crossfade.p2p.memory import Side
from crossfade.p2p.pair import Pair
from crossfade.p2p.transfer import Receive, Transfer


class Pairs:
    """Any thread may use it: ``lock`` is held while one works on pairs. ``each``: by rank, this one's with itself among them."""

    def __init__(self, pairs: list[Pair], sides: Iterable[Side]) -> None:
        self.lock = threading.RLock()
        self.each = pairs
        self.is_closed = False
        self._sides = list(sides)

    def look(self) -> bool:
        """Handles what other ranks have said. Whether anything came."""
        has_come = False
        with self.lock:
            if self.is_closed:
                return False
            for side in self._sides:
                while side.forgotten:
                    memory = side.forgotten.pop()
                    for pair in self.each:
                        pair.carrier.forget(memory)
            for pair in self.each:
                if pair.progress():
                    has_come = True
        return has_come

    def is_quiet(self) -> bool:
        """Whether no other rank waits for what this process's host still has to do."""
        with self.lock:
            return self.is_closed or all([pair.is_quiet for pair in self.each])

    def work_off(self) -> bool:
        """Copies the values that the program leaves where they lie. Whether all is quiet then."""
        with self.lock:
            if not self.is_closed:
                for pair in self.each:
                    pair.land_all()
            return self.is_quiet()

    def land(self, transfer: Transfer) -> bool:
        """Copies the value of a receive that waits where it lies, if it does, on the current stream. Whether it did."""
        if isinstance(transfer, Receive):
            with self.lock:  # another thread may be at it
                if self.each and transfer.is_to_land():
                    self.each[transfer.rank].land(transfer)
                    return True
        return False

    def are_over(self, transfers: Sequence[Transfer]) -> bool:
        """Whether the copies of transfers have been made, or cannot be made any more. Begins those of values that wait."""
        for transfer in transfers:
            if isinstance(transfer, Receive) and transfer.is_to_land():
                with self.lock:
                    if self.each:
                        self.each[transfer.rank].land_all()
            if transfer.error is None and not (transfer.is_enqueued and transfer.is_copied()):
                return False
        return True
