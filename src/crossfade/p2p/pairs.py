"""A rank's pairs with all ranks, and what any of its threads does for them."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from copy import copy

from crossfade.p2p.memory import Side
from crossfade.p2p.pair import Pair
from crossfade.p2p.transfer import Receive, Transfer


class Pairs:
    """Any thread may use it: ``lock`` is held while one works on pairs. ``each``: by rank, this one's with itself among them.
    A stream waits ahead for ``limit_s`` seconds; ``too_late``: the error for what has not come by then.
    """

    def __init__(
        self,
        pairs: list[Pair],
        sides: Iterable[Side],
        limit_s: float,
        too_late: Callable[[str, float], Exception],
    ) -> None:
        self.lock = threading.RLock()
        self.each = pairs
        self._in_use: list[Pair] = []
        self._unused = dict(enumerate(pairs))  # by rank: nothing has begun here, and nothing has come
        self.is_closed = False
        self._sides = list(sides)
        self._too_late = too_late
        self._limit_s = limit_s
        self._ahead: deque[tuple[float, Receive]] = deque()  # receives for which a stream waits ahead, and until when
        self._released: list[Receive] = []  # those of them that will not come
        self._lost: Exception | None = None
        self.has_raised = False  # that something was lost

    def use(self, ranks: Sequence[int]) -> None:
        """Transfers with these ranks are about to begin. Before that, a look at a pair is one for letters."""
        for rank in ranks:
            if rank in self._unused:
                with self.lock:
                    if (pair := self._unused.pop(rank, None)) is not None:
                        self._in_use.append(pair)

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
            if self._unused:
                self.use([rank for rank, pair in self._unused.items() if pair.has_letters()])
            for pair in self._in_use:
                if pair.progress():
                    has_come = True
            self._expire()
        return has_come

    def land_ahead(self, receive: Receive) -> bool:
        """Lets the current stream wait for a posted value that has not been sent yet, where nothing more of this host is needed for
        that: by the rank that sends it, or by any other. Whether it does, or the value has come meanwhile.
        """
        with self.lock:
            if not (self.each and self.each[receive.rank].pushes_next()):
                return False
            self.look()  # what was announced before the mark went down
            if not (receive.is_settled or any([pair.is_waited_for for pair in self._in_use])):
                self.each[receive.rank].land_ahead(receive)
                if receive.ahead is not None:
                    self._ahead.append((time.monotonic() + self._limit_s, receive))
            return receive.is_settled

    def _expire(self) -> None:
        """Gives up what a stream has waited ahead for too long."""
        ahead = self._ahead
        while ahead:
            end_s, receive = ahead[0]
            if receive.ahead is not None and receive.error is None:
                if time.monotonic() < end_s:
                    return
                self.each[receive.rank].give_up(self._too_late(str(receive), self._limit_s))
            ahead.popleft()
            if receive.error is not None:
                self._released.append(receive)

    def _release_again(self) -> None:
        """Releases streams whose receives have failed once more: the other rank's stream may have set the counter back since."""
        self._released = [
            receive for receive in self._released if receive.ahead is not None and not receive.is_copied()
        ]
        for receive in self._released:
            if receive.ahead is not None:
                receive.ahead.release()

    def awaited(self) -> str:
        """What a stream waits for ahead, in words; "" for nothing."""
        with self.lock:
            self._expire()
            self._release_again()
            return f"waits on its GPU for {self._ahead[0][1]}" if self._ahead else ""

    def check(self) -> None:
        """Raises if a stream has waited ahead for what did not come: what the program has computed from it is not valid."""
        with self.lock:
            self._lost = self._lost or self._find_lost()
            if self._lost is not None:
                self.has_raised = True
                raise copy(self._lost)

    def _find_lost(self) -> Exception | None:
        lost = (pair.carrier.lost for pair in self.each)
        return next((error for error in lost if error is not None), None)

    def has_landings_to_come(self) -> bool:
        """Whether values are to be copied as soon as a device says that they have come, which wakes nobody."""
        with self.lock:
            return any([pair.carrier.landings_to_come() for pair in self._in_use])

    def is_quiet(self) -> bool:
        """Whether no other rank waits for what this process's host still has to do."""
        with self.lock:
            return self.is_closed or all([pair.is_quiet for pair in self._in_use])

    def work_off(self) -> bool:
        """Copies the values that the program leaves where they lie. Whether all is quiet then."""
        with self.lock:
            if not self.is_closed:
                for pair in self.each:
                    pair.land_all(may_wait=False)
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
                        self.each[transfer.rank].land_all(may_wait=False)
            if transfer.error is None and not (transfer.is_enqueued and transfer.is_copied()):
                return False
        return True

    def forget(self) -> None:
        """The pairs are closed, and their memory can go."""
        self._lost = self._lost or self._find_lost()
        self.each, self._in_use = [], []
        self._unused = {}
        self._ahead.clear()
        self._released.clear()
