"""Collectives in one thread, by the reference of `collectives.terms`: what movers between processes are held against."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from crossfade.channels.protocol import ChannelStatistics
from crossfade.collectives.terms import Offer, Terms, conclude, make_offer, reference
from crossfade.errors import ChannelBroken, ChannelClosed


class _Rendezvous:
    """The parties' offers that are not matched yet, and results that are not taken yet."""

    def __init__(self, terms: Terms) -> None:
        self.terms = terms
        self.offers: list[deque[Offer]] = [deque() for _ in terms.parties]
        self.results: list[deque[Sequence[object]]] = [deque() for _ in terms.parties]
        self.gone = ""

    def move(self, num_outputs: int) -> None:
        """Does the collective if all parties have come."""
        if not all(self.offers):
            return
        offers = [queue.popleft() for queue in self.offers]
        layouts = [offer.layout() for offer in offers]
        complaints = [None if offer.failure is None else offer.complaint() for offer in offers]
        failure = conclude(self.terms, layouts, complaints)
        given: Sequence[Sequence[object]] = [[failure] * num_outputs] * len(offers)
        results = given if failure is not None else reference(self.terms, offers)
        for queue, result in zip(self.results, results, strict=True):
            queue.append(result)


def open_local_collective(terms: Terms, num_outputs: int) -> list[LocalCollective]:
    """The ends of a new collective, in rank order, for one thread. ``num_outputs`` is how many values each party gets."""
    table = _Rendezvous(terms)
    return [LocalCollective(table, rank, num_outputs) for rank in range(len(terms.parties))]


class LocalCollective:
    """One party's end."""

    on_moved: Callable[[int, int], None] | None = None

    def __init__(self, table: _Rendezvous, rank: int, num_outputs: int) -> None:
        self._table = table
        self._rank = rank
        self._num_outputs = num_outputs
        self._is_closed = False
        self._num_values = 0
        self._num_bytes = 0

    def start(self, values: Sequence[object]) -> None:
        self._raise_if_ended()
        offer = make_offer(self._table.terms, self._rank, values, device=None)
        self._table.offers[self._rank].append(offer)
        self._num_values += 1
        self._num_bytes += sum(tensor.nbytes for tensor in offer.tensors)
        self._table.move(self._num_outputs)

    def pass_on(self) -> None:
        """Results are there."""

    def try_finish(self) -> Sequence[object] | None:
        results = self._table.results[self._rank]
        if results:
            return results.popleft()
        self._raise_if_ended()
        return None

    def _raise_if_ended(self) -> None:
        if self._is_closed:
            raise ChannelClosed(f"{self._table.terms.label} was closed by this side")
        if self._table.gone:
            raise ChannelBroken(f"{self._table.terms.label} is broken: {self._table.gone}")

    def is_idle(self) -> bool:
        return not self._table.results[self._rank]

    def break_off(self, reason: str) -> None:
        self._table.gone = self._table.gone or reason

    def close(self) -> None:
        self._is_closed = True
        self._table.gone = self._table.gone or "another party closed it"

    def statistics(self) -> ChannelStatistics:
        return ChannelStatistics(self._num_values, self._num_bytes)
