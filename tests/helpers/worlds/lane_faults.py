"""Lanes with a fault each, for the fake machine to find: in collectives, in operators by copy engines, in sums in turns."""

from __future__ import annotations

from typing import Any

from crossfade.device.signals import CLEAR, SET
from crossfade.peers.lane import Epoch, Lane


class SignalBeforeData(Lane):
    """Sets ``full`` before a push copies anything."""

    _epoch: Epoch | None = None

    def advance(self) -> Epoch:
        self._epoch = super().advance()
        return self._epoch

    def copy(self, stream: int, target: int, source: int, size_bytes: int) -> None:
        if self._epoch is not None:
            super().announce(self._epoch, self.memory.peers, stream)
            self._epoch = None
        super().copy(stream, target, source, size_bytes)

    def announce(self, epoch: Epoch, peers: list[int], stream: int, step: int = SET) -> None:
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

    def await_full(self, epoch: Epoch, peers: list[int], stream: int) -> None:
        pass


class NoStepWait(Lane):
    """Does not wait for steps."""

    def await_step(self, epoch: Epoch, peers: list[int], stream: int, step: int, num_steps: int) -> None:
        pass


class NoWaitAtAll(NoWait, NoStepWait):
    """For neither."""


class WaitBehindFork(Lane):
    """Waits for the others only in front of the copies, and not in front of what goes on beside these."""

    _held: tuple[Epoch, list[int], int] | None = None

    def await_full(self, epoch: Epoch, peers: list[int], stream: int) -> None:
        self._held = epoch, peers, stream

    def copy(self, stream: int, target: int, source: int, size_bytes: int) -> None:
        if self._held is not None:
            super().await_full(*self._held)
            self._held = None
        super().copy(stream, target, source, size_bytes)


class SignalAfterWait(Lane):
    """Sets ``full`` on the local stream, behind nothing that waits, but enqueues that after the waits."""

    def announce(self, epoch: Epoch, peers: list[int], stream: int, step: int = SET) -> None:
        self.fork_local(stream)

    def await_full(self, epoch: Epoch, peers: list[int], stream: int) -> None:
        super().await_full(epoch, peers, stream)
        super().announce(epoch, peers, self.local)


class NeverEven(Lane):
    """Ends a captured collective on an odd number of exchanges."""

    @property
    def is_uneven(self) -> bool:
        return False


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


# which operators by copy engines would show


class EarlySignal(Lane):
    """Sets ``full`` as soon as an exchange begins, on the caller's stream."""

    def advance(self) -> Epoch:
        epoch = super().advance()
        assert self._stream is not None
        super().announce(epoch, self.memory.peers, self._stream)
        return epoch

    def announce(self, epoch: Epoch, peers: list[int], stream: int, step: int = SET) -> None:
        pass


class NoLocalFork(Lane):
    """The local stream does not go on behind the caller's."""

    def fork_local(self, stream: int) -> int:
        return self.local


class NoLocalJoin(Lane):
    """The caller's stream does not go on behind the local one."""

    def join_local(self, stream: int) -> None:
        pass


# which sums in turns would show. An exchange of parts is announced to one rank at a time, one of sums to all at once; with two
# ranks the two look alike. So the lanes count: of an all-reduce's two exchanges the second one has the sums.


class StepBeforeCopy(Lane):
    """Sets a step in front of the copies that it stands for."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._held: list[tuple[int, int, int, int]] = []

    def copy(self, stream: int, target: int, source: int, size_bytes: int) -> None:
        self._held.append((stream, target, source, size_bytes))

    def announce(self, epoch: Epoch, peers: list[int], stream: int, step: int = SET) -> None:
        super().announce(epoch, peers, stream, step)
        self._let_go()

    def join_local(self, stream: int) -> None:
        self._let_go()
        super().join_local(stream)

    def _let_go(self) -> None:
        held, self._held = self._held, []
        for each in held:
            super().copy(*each)


class NeverCleared(Lane):
    """The wait for the last step clears nothing."""

    def await_step(self, epoch: Epoch, peers: list[int], stream: int, step: int, num_steps: int) -> None:
        super().await_step(epoch, peers, stream, step, num_steps + 1)


class StepBehind(Lane):
    """Waits for the step before the one that is asked for, but clears with the last."""

    def await_step(self, epoch: Epoch, peers: list[int], stream: int, step: int, num_steps: int) -> None:
        earlier = max(step - 1, 1)
        if step < num_steps:
            super().await_step(epoch, peers, stream, earlier, num_steps)
            return
        addresses = [epoch.incoming[peer].address for peer in peers]
        self.memory.driver.wait_all_and_reset(stream, addresses, earlier, CLEAR)


class _KnowsSums(Lane):
    """For all-reduces in turns alone: which exchange has the sums."""

    def advance(self) -> Epoch:
        self._sums = super().advance()
        return self._sums

    def _has_sums(self, epoch: Epoch) -> bool:
        return epoch is self._sums


class SumsBeforeAdd(_KnowsSums):
    """Announces sums when the parts have come, in front of what adds them."""

    def await_step(self, epoch: Epoch, peers: list[int], stream: int, step: int, num_steps: int) -> None:
        super().await_step(epoch, peers, stream, step, num_steps)
        if not self._has_sums(epoch):
            super().announce(self._sums, peers, stream, step)

    def announce(self, epoch: Epoch, peers: list[int], stream: int, step: int = SET) -> None:
        if not self._has_sums(epoch):
            super().announce(epoch, peers, stream, step)


class FetchElsewhere(_KnowsSums):
    """Waits for sums on the caller's stream, while they are fetched on the local one."""

    def await_step(self, epoch: Epoch, peers: list[int], stream: int, step: int, num_steps: int) -> None:
        if self._has_sums(epoch):
            assert self._stream is not None
            stream = self._stream
        super().await_step(epoch, peers, stream, step, num_steps)


class StepsByTheStream(Lane):
    """Steps of parts are set on the caller's stream, which knows that they are computed, and not that they are copied."""

    def announce(self, epoch: Epoch, peers: list[int], stream: int, step: int = SET) -> None:
        assert self._stream is not None
        super().announce(epoch, peers, self._stream, step)
