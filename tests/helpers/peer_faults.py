"""Lanes with a fault each, for the fake machine to find."""

from __future__ import annotations

from typing import Any

from crossfade.peers.lane import Epoch, Lane


class SignalBeforeData(Lane):
    """Sets ``full`` before a push copies anything."""

    _epoch: Epoch

    def advance(self) -> Epoch:
        self._epoch = super().advance()
        return self._epoch

    def fork(self, stream: int, num_streams: int) -> list[int]:
        super().announce(self._epoch, self.home.peers, stream, is_batched=True)
        return super().fork(stream, num_streams)

    def announce(self, epoch: Epoch, peers: list[int], stream: int, *, is_batched: bool) -> None:
        pass


class OneBuffer(Lane):
    """Has one buffer and not two; signals it has two of."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        first, second = self._epochs
        self._epochs = [first, second._replace(buffers=first.buffers)]


class OneSignal(Lane):
    """Has one signal between two ranks and not two; buffers it has two of."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        first, second = self._epochs
        self._epochs = [first, first._replace(buffers=second.buffers)]


class NoWait(Lane):
    """Does not wait for the others."""

    def await_full(self, epoch: Epoch, peers: list[int], stream: int, *, is_batched: bool) -> None:
        pass


class SignalAfterWait(Lane):
    """Sets ``full`` on a side stream, behind nothing that waits, but enqueues that after the waits."""

    _late: tuple[Epoch, list[int]]

    def announce(self, epoch: Epoch, peers: list[int], stream: int, *, is_batched: bool) -> None:
        self._late = epoch, peers
        if is_batched:  # an empty exchange has no side streams
            super().announce(epoch, peers, stream, is_batched=True)

    def join(self, streams: list[int]) -> None:
        super().announce(*self._late, streams[-1], is_batched=True)
        super().join(streams)


class NeverEven(Lane):
    """Ends a captured collective on an odd number of exchanges."""

    @property
    def is_uneven(self) -> bool:
        return False


class NoFork(Lane):
    """Side streams do not begin behind the caller's."""

    def fork(self, stream: int, num_streams: int) -> list[int]:
        return [stream, *self.sides[: num_streams - 1]]


class NoJoin(Lane):
    """The caller's stream goes on, and does not wait for the side streams."""

    def join(self, streams: list[int]) -> None:
        pass


class NoOrder(Lane):
    """A call does not wait for the one before it on another stream."""

    def begin(self, stream: int, **options: Any) -> None:
        self._stream = None
        super().begin(stream, **options)


class ForgetsWhenCaptured(Lane):
    """A captured call makes the lane forget where the last one ran that was not captured."""

    def begin(self, stream: int, *, is_captured: bool = False, **options: Any) -> None:
        super().begin(stream, is_captured=is_captured, **options)
        if is_captured:
            self._stream = None
