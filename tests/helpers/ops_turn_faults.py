"""Lanes with a fault each, which sums in turns would show on the fake machine.

An exchange of parts is announced to one rank at a time, one of sums to all at once; with one other rank the two look alike. So the
lanes count: of an all-reduce's two exchanges the second one has the sums.
"""

from __future__ import annotations

from typing import Any

from crossfade.device.signals import CLEAR
from crossfade.ops import overlaps
from crossfade.peers.lane import Epoch, Lane


class StepBeforeCopy(Lane):
    """Sets a step in front of the copies that it stands for; `hold` takes the place of `turns.copy`."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._held: list[tuple[int, int, int, int]] = []

    def hold(self, *copy: int) -> None:
        self._held.append(copy)  # type: ignore[arg-type]

    def announce_step(self, epoch: Epoch, peers: list[int], stream: int, step: int) -> None:
        super().announce_step(epoch, peers, stream, step)
        self._let_go()

    def join_local(self, stream: int) -> None:
        self._let_go()
        super().join_local(stream)

    def _let_go(self) -> None:
        held, self._held = self._held, []
        for each in held:
            overlaps.copy(self, *each)


def hold(lane: StepBeforeCopy, *copy: int) -> None:
    """In the place of `turns.copy`."""
    lane.hold(*copy)


class NeverCleared(Lane):
    """The wait for the last step clears nothing."""

    def await_step(self, epoch: Epoch, peers: list[int], stream: int, step: int, num_steps: int) -> None:
        super().await_step(epoch, peers, stream, step, num_steps + 1)


class NoStepWait(Lane):
    """Does not wait for steps."""

    def await_step(self, epoch: Epoch, peers: list[int], stream: int, step: int, num_steps: int) -> None:
        pass


class StepBehind(Lane):
    """Waits for the step before the one that is asked for, but clears with the last."""

    def await_step(self, epoch: Epoch, peers: list[int], stream: int, step: int, num_steps: int) -> None:
        earlier = max(step - 1, 1)
        if step < num_steps:
            super().await_step(epoch, peers, stream, earlier, num_steps)
            return
        addresses = [epoch.incoming[peer].address for peer in peers]
        self.home.driver.wait_all_and_reset(stream, addresses, earlier, CLEAR)


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
            super().announce_step(self._sums, peers, stream, step)

    def announce_step(self, epoch: Epoch, peers: list[int], stream: int, step: int) -> None:
        if not self._has_sums(epoch):
            super().announce_step(epoch, peers, stream, step)


class FetchElsewhere(_KnowsSums):
    """Waits for sums on the caller's stream, while they are fetched on the local one."""

    def await_step(self, epoch: Epoch, peers: list[int], stream: int, step: int, num_steps: int) -> None:
        if self._has_sums(epoch):
            assert self._stream is not None
            stream = self._stream
        super().await_step(epoch, peers, stream, step, num_steps)


class StepsByTheStream(Lane):
    """Steps of parts are set on the caller's stream, which knows that they are computed, and not that they are copied."""

    def announce_step(self, epoch: Epoch, peers: list[int], stream: int, step: int) -> None:
        assert self._stream is not None
        super().announce_step(epoch, peers, self._stream, step)
