"""Collectives in one thread, by the reference of `collectives.terms`: what movers between processes are held against."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from crossfade.channels.protocol import ChannelStatistics
from crossfade.collectives.terms import Meeting, Offer, conclude, make_offer, reference
from crossfade.errors import ChannelBroken, ChannelClosed

__all__ = ["LocalCollective", "open_local_collective"]


class _Table:
    """What the parties share: what each has brought and nobody has met with, and what each is to get."""

    def __init__(self, meeting: Meeting) -> None:
        self.meeting = meeting
        self.offers: list[deque[Offer]] = [deque() for _ in meeting.parties]
        self.results: list[deque[Sequence[object]]] = [deque() for _ in meeting.parties]
        self.gone = ""

    def meet(self, num_outputs: int) -> None:
        """Does the collective if everybody has come."""
        if not all(self.offers):
            return
        offers = [queue.popleft() for queue in self.offers]
        layouts = [offer.layout() for offer in offers]
        complaints = [None if offer.failure is None else offer.complaint() for offer in offers]
        failure = conclude(self.meeting, layouts, complaints)
        given: Sequence[Sequence[object]] = [[failure] * num_outputs] * len(offers)
        results = given if failure is not None else reference(self.meeting, offers)
        for queue, result in zip(self.results, results, strict=True):
            queue.append(result)


def open_local_collective(meeting: Meeting, num_outputs: int) -> list[LocalCollective]:
    """The ends of a new collective, in rank order, for one thread. ``num_outputs`` is how many values each party gets."""
    table = _Table(meeting)
    return [LocalCollective(table, rank, num_outputs) for rank in range(len(meeting.parties))]


class LocalCollective:
    """One party's end."""

    on_moved: Callable[[int, int], None] | None = None

    def __init__(self, table: _Table, rank: int, num_outputs: int) -> None:
        self._table = table
        self._rank = rank
        self._num_outputs = num_outputs
        self._is_closed = False
        self._num_values = 0
        self._num_bytes = 0

    def start(self, values: Sequence[object]) -> None:
        """See the protocol."""
        self._raise_if_ended()
        offer = make_offer(self._table.meeting, self._rank, values, device=None)
        self._table.offers[self._rank].append(offer)
        self._num_values += 1
        self._num_bytes += sum(tensor.nbytes for tensor in offer.tensors)
        self._table.meet(self._num_outputs)

    def pass_on(self) -> None:
        """See the protocol: what comes out is there."""

    def try_finish(self) -> Sequence[object] | None:
        """See the protocol."""
        results = self._table.results[self._rank]
        if results:
            return results.popleft()
        self._raise_if_ended()
        return None

    def _raise_if_ended(self) -> None:
        if self._is_closed:
            raise ChannelClosed(f"{self._table.meeting.label} was closed by this side")
        if self._table.gone:
            raise ChannelBroken(f"{self._table.meeting.label} is broken: {self._table.gone}")

    def is_idle(self) -> bool:
        """See the protocol."""
        return not self._table.results[self._rank]

    def break_off(self, reason: str) -> None:
        """See the protocol."""
        self._table.gone = self._table.gone or reason

    def close(self) -> None:
        """See the protocol."""
        self._is_closed = True
        self._table.gone = self._table.gone or "another party closed it"

    def statistics(self) -> ChannelStatistics:
        """See the protocol."""
        return ChannelStatistics(self._num_values, self._num_bytes)
