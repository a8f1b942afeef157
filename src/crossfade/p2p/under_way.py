"""Transfers that only devices have something left to do for."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from crossfade.device.signals import Counter
from crossfade.p2p.transfer import Transfer


class UnderWay:
    """The transfers with one rank whose copies are enqueued, and their tensors. There is a queue for each stream, whose copies end
    in its order, and one for those that end by a counter which the other rank sets, in any order: there a transfer may keep later
    ones' tensors.
    """

    def __init__(self) -> None:
        # By whether the stream is the host's, and the stream, None for those that end by a counter.
        self._queues: dict[tuple[bool, int | None], deque[tuple[Transfer, Counter | None, int]]] = {}

    def add(self, transfer: Transfer, done: Counter | None = None, uses: int = 0) -> None:
        """``done`` is to be set to ``uses`` by the host, once the copy has been made."""
        key = transfer.side.is_host, transfer.copy_stream
        self._queues.setdefault(key, deque()).append((transfer, done, uses))

    def collect(self) -> None:
        """Releases tensors that no device uses any more. An interrupt may come anywhere: what is not done whole is done again."""
        for queue in self._queues.values():
            while queue and queue[0][0].is_copied():
                transfer, done, uses = queue[0]
                if done is not None:
                    done.set_from_host(uses)
                transfer.let_go()
                queue.popleft()

    def __iter__(self) -> Iterator[Transfer]:
        """Any thread may ask, while another one adds."""
        return iter([transfer for queue in tuple(self._queues.values()) for transfer, _, _ in tuple(queue)])

    def __bool__(self) -> bool:
        return any(self._queues.values())

    def clear(self) -> None:
        """The other rank has died, and no device does anything for it any more."""
        for transfer in self:
            transfer.let_go()
        self._queues.clear()
