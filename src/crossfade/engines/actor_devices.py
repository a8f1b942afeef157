"""The device side of an actor: its devices, and the plans that use them, until nothing of them is in use any more."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from crossfade.device.signals import Releasable
from crossfade.engines.alarm import Alarm
from crossfade.engines.board import peers_of
from crossfade.engines.device_ends import DeviceEnds
from crossfade.engines.devices import Devices, select_gpus
from crossfade.errors import DeviceError
from crossfade.host.doorbell import Bell, Doorbell
from crossfade.host.memory import Memory
from crossfade.plan.plan import Plan
from crossfade.plan.spans import Span
from crossfade.runtime.device_record import DeviceRecorder
from crossfade.runtime.record import Recorder

if TYPE_CHECKING:
    from crossfade.edges.host_copies import HostCopies

__all__ = ["ActorDevices"]


class ActorDevices:
    """What an actor's loop has to do for its devices.

    A plan goes four steps: it is *open*; once left, it *settles* until no value is on its way; then it is *left over* as long as
    the program keeps tensors that came through it; at last it is *empty*, and its pinned memory is given up when the devices are
    idle, for that waits for all their streams, and one may wait for another plan's host.

    Args:
        gpus: indices of its GPUs.
        on_death: called, in another thread, when a peer has died, before any stream that waits for it is let go.
        doorbell: of this process.
        on_fault: called when a plan, by its number, cannot go on, and why.

    Attributes:
        is_busy: whether `serve` should be called now and then, and not only when the doorbell was rung.
    """

    def __init__(
        self,
        gpus: Sequence[int],
        on_death: Callable[[str], None],
        doorbell: Doorbell,
        on_fault: Callable[[int, str], None],
    ) -> None:
        self.is_busy = False
        self._on_fault = on_fault
        self._alarm = Alarm(doorbell)
        self._gpus = gpus
        self._devices = Devices(gpus, self._signals, on_death)
        self._open: dict[int, DeviceEnds] = {}
        self._settling: dict[int, tuple[DeviceEnds, Callable[[], None]]] = {}
        self._left_over: dict[int, DeviceEnds] = {}
        self._empty: list[DeviceEnds] = []
        self._lost: list[DeviceEnds] = []  # of plans whose device refused to end them: it may still use what they have
        self._recorders: dict[int, list[DeviceRecorder]] = {}
        self._copies: HostCopies | None = None

    def select(self) -> None:
        """See `select_gpus`."""
        select_gpus(self._gpus)

    def failure(self) -> str:
        """See `Devices.failure`."""
        return self._devices.failure()

    def _ends(self) -> list[DeviceEnds]:
        """Of all plans, wherever they stand; some may be named twice. Any thread may ask: a plan is noted where it goes before it
        is taken from where it was.
        """
        ends = list(self._open.values())
        ends += [each for each, _ in list(self._settling.values())]
        return ends + list(self._left_over.values())

    def _signals(self, peer: str) -> Sequence[Releasable]:
        return [signal for ends in self._ends() for signal in ends.signals(peer)]

    def break_off(self, peer: str, reason: str) -> None:
        """A peer is gone, also for plans that were left: what would still come from there does not. Any thread may call it."""
        for ends in self._ends():
            ends.break_off(peer, reason)
        self.is_busy = True

    def open(
        self, number: int, plan: Plan, party: str, shared: Mapping[str, Memory], pidfds: Mapping[str, int]
    ) -> DeviceEnds:
        """Prepares the device ends of a plan.

        Args:
            number: of the plan.
            plan: the plan.
            party: who this is.
            shared: the plan's `crossfade.engines.board.device_memories`; owned by the ends from now on.
            pidfds: of the peers that live.

        Raises:
            MissingDependency, DeviceError: see `DeviceEnds`.
        """
        self._end_left_over()
        ends = self._open[number] = DeviceEnds(plan, party, shared, self._devices, pidfds, self._alarm.wake_in)
        for peer in peers_of(plan, party) & pidfds.keys():
            self._devices.watch(peer, pidfds[peer], number)
        return ends

    def host_copies(self, bell: Bell, spin_us: float) -> HostCopies | None:
        """How tensors go between this actor's GPUs and hosts; None if it has none, or if what that takes is not installed."""
        if self._copies is None and self._gpus:
            with suppress(ImportError):
                from crossfade.edges.host_copies import HostCopies

                self._copies = HostCopies(
                    list({id(home): home for home in self._devices.homes}.values()), bell, spin_us
                )
        return self._copies

    @property
    def is_pending(self) -> bool:
        """Whether values are on their way to hosts, so that `poll` should be called."""
        return self._copies is not None and self._copies.is_pending

    def poll(self) -> bool:
        """Tells hosts of the values that are there by now; whether there were any."""
        return self._copies is not None and self._copies.poll()

    def record(self, number: int, recorder: Recorder) -> list[tuple[DeviceRecorder, int]]:
        """Begins to record what a plan does on this actor's GPUs: for each, with the stream on which its methods compute."""
        homes = list({id(home): home for home in self._devices.homes}.values())
        made = self._recorders[number] = [DeviceRecorder(home.driver, recorder) for home in homes]
        if number in self._open:
            self._open[number].record(made)
        return [(device, home.compute_stream()) for device, home in zip(made, homes, strict=True)]

    def spans(self, number: int) -> list[Span]:
        """What ran on this actor's GPUs for a plan."""
        return [span for recorder in self._recorders.get(number, ()) for span in recorder.spans()]

    def leave(self, number: int, on_left: Callable[[], None], absent: Sequence[str] = ()) -> None:
        """The ends of a plan are closed; ``on_left`` is called once no value of it is on its way any more.

        Args:
            number: of the plan. It may have been left before, and nobody have known then that somebody was absent.
            on_left: takes the place of an earlier one.
            absent: who could not open the plan.
        """
        for recorder in self._recorders.pop(number, ()):
            with suppress(DeviceError):
                recorder.close()
        before = self._settling.get(number)
        ends = self._open.get(number) if before is None else before[0]
        if ends is None:
            self.is_busy |= self._end_left_over()
            on_left()
            return
        self._settling[number] = (ends, on_left)
        self._open.pop(number, None)
        ends.go_without(absent)
        self.is_busy = True
        self.serve()

    def abandon(self, number: int) -> None:
        """The plan could not be opened."""
        self.leave(number, lambda: None)

    def serve(self) -> None:
        """Sees to records that no step waits for, and to plans that are being left. A device that refuses ends a plan, and not
        the actor.
        """
        has_more = any([self._serve(number, ends) for number, ends in self._open.items()])
        for number, (ends, on_left) in list(self._settling.items()):
            try:
                if not ends.settle():
                    continue
                self._left_over[number] = ends
            except DeviceError:
                self._lost.append(ends)
                self._devices.forget(number)
                ends.abandon()
            del self._settling[number]
            on_left()
        has_to_wait = self._end_left_over()
        self.is_busy = has_more or bool(self._settling) or has_to_wait

    def _serve(self, number: int, ends: DeviceEnds) -> bool:
        try:
            return ends.serve()
        except DeviceError as error:
            self._on_fault(number, str(error))
            return False

    def _end_left_over(self) -> bool:
        """Gives back what nobody uses any more; whether some of it has to wait for the devices."""
        for number, ends in list(self._left_over.items()):
            with suppress(DeviceError):  # else it is tried again
                ends.serve()
                if ends.is_empty:
                    self._empty.append(ends)
                    del self._left_over[number]
                    self._devices.forget(number)
        has_to_wait = self._release_empty()
        return (self._copies is not None and self._copies.pins.collect()) or has_to_wait

    def _release_empty(self) -> bool:
        """Gives up what is left of empty plans, if that does not have to wait; whether it does."""
        if not self._empty:
            return False
        with suppress(DeviceError):  # a device that refuses keeps it
            if not all(home.is_idle() for home in self._devices.homes):
                return True
            while self._empty:
                self._empty[-1].release()
                self._empty.pop()
            if not (self._open or self._settling or self._left_over):
                self._devices.trim()
        return False
