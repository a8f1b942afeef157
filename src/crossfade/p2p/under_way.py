"""Transfers that only devices have something left to do for."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from crossfade.device.signals import Counter
from crossfade.p2p.transfer import Transfer


class UnderWay:
    """The transfers with one rank whose copies are enqueued; it keeps their tensors. Those of one stream end in their order, so
    that none waits here for one that it does not wait for on the device.
    """

    def __init__(self) -> None:
        self._by_stream: dict[int, deque[tuple[Transfer, Counter | None, int]]] = {}

    def add(self, transfer: Transfer, done: Counter | None = None, uses: int = 0) -> None:
        """``done`` is to be set to ``uses`` by the host, once the copy has been made."""
        self._by_stream.setdefault(transfer.copy_stream, deque()).append((transfer, done, uses))

    def collect(self) -> None:
        """Releases tensors that no device uses any more."""
        for each in self._by_stream.values():
            while each and each[0][0].is_copied():
                transfer, done, uses = each.popleft()
                transfer.let_go()
                if done is not None:
                    done.set_from_host(uses)

    def __iter__(self) -> Iterator[Transfer]:
        return (transfer for each in self._by_stream.values() for transfer, _, _ in tuple(each))

    def __bool__(self) -> bool:
        return any(self._by_stream.values())

    def clear(self) -> None:
        """The other rank has died, and no device does anything for it any more."""
        for transfer in self:
            transfer.let_go()
        self._by_stream.clear()
