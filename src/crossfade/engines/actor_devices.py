"""The device side of an actor: its devices, and the plans that use them, until nothing of them is in use any more."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from crossfade.device.signals import Releasable
from crossfade.edges.life import Event, State
from crossfade.engines.alarm import Alarm
from crossfade.engines.board import peers_of
from crossfade.engines.device_ends import DeviceEnds
from crossfade.engines.devices import Devices, distinct, select_gpus
from crossfade.errors import DeviceError
from crossfade.host.doorbell import Bell, Doorbell
from crossfade.host.memory import Memory
from crossfade.plan.plan import Plan
from crossfade.plan.spans import Span
from crossfade.runtime.device_record import DeviceRecorder
from crossfade.runtime.record import Recorder

if TYPE_CHECKING:
    from crossfade.edges.host_copies import HostCopies


class ActorDevices:
    """The devices' share of an actor's loop.

    The life of each plan is that of ``edges.life``. A plan is released only when the devices are idle: unpinning its memory waits
    for all their streams, and a stream might wait for another plan's host.
    """

    def __init__(
        self,
        gpus: Sequence[int],
        # Called, in another thread, when a peer has died, before any stream that waits for it is released.
        on_death: Callable[[str], None],
        doorbell: Doorbell,
        on_fault: Callable[[int, str], None],  # called when a plan, by its number, cannot continue, and why
    ) -> None:
        self.is_busy = False  # whether `serve` should be called now and then, and not only when the doorbell was rung
        self._on_fault = on_fault
        self._alarm = Alarm(doorbell)
        self._gpus = gpus
        self._devices = Devices(gpus, self._signals, on_death)
        self._plans: dict[int, DeviceEnds] = {}  # until nobody looks at their signals any more
        self._on_left: dict[int, Callable[[], None]] = {}
        self._unused: list[DeviceEnds] = []  # to be released when the devices are idle
        self._lost: list[DeviceEnds] = []  # their devices may still use what they have
        self._recorders: dict[int, list[DeviceRecorder]] = {}
        self._copies: HostCopies | None = None

    def select(self) -> None:
        select_gpus(self._gpus)

    def failure(self) -> str:
        return self._devices.failure()

    def _signals(self, peer: str) -> Sequence[Releasable]:
        return [signal for ends in list(self._plans.values()) for signal in ends.signals(peer)]

    def break_off(self, peer: str, reason: str) -> None:
        """A peer is gone, also for plans that were left: what would still come from there does not. Any thread may call it."""
        for ends in list(self._plans.values()):
            ends.on(Event.PEER_DIED, peer, reason)
        self.is_busy = True

    def open(
        self, number: int, plan: Plan, party: str, shared: Mapping[str, Memory], pidfds: Mapping[str, int]
    ) -> DeviceEnds:
        """Prepares the device ends of a plan, which own ``shared`` (`crossfade.engines.board.device_memories`) from now on.
        ``pidfds`` are those of the living peers. Raises as `DeviceEnds` does.
        """
        self._let_go_of_drained()
        ends = self._plans[number] = DeviceEnds(plan, party, shared, self._devices, pidfds, self._alarm.wake_in)
        for peer in peers_of(plan, party) & pidfds.keys():
            self._devices.watch(peer, pidfds[peer], number)
        return ends

    def host_copies(self, bell: Bell, spin_us: float) -> HostCopies | None:
        """How tensors go between this actor's GPUs and hosts; None if it has none, or if what that takes is not installed."""
        if self._copies is None and self._gpus:
            with suppress(ImportError):
                from crossfade.edges.host_copies import HostCopies
                from crossfade.edges.publisher import PUBLISH_US

                self._copies = HostCopies(distinct(self._devices.homes), bell, min(spin_us, PUBLISH_US))
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
        homes = distinct(self._devices.homes)
        made = self._recorders[number] = [DeviceRecorder(home.driver, recorder) for home in homes]
        if number in self._plans:
            self._plans[number].record(made)
        return [(device, home.compute_stream()) for device, home in zip(made, homes, strict=True)]

    def spans(self, number: int) -> list[Span]:
        """What ran on this actor's GPUs for a plan."""
        return [span for recorder in self._recorders.get(number, ()) for span in recorder.spans()]

    def leave(self, number: int, on_left: Callable[[], None], absent: Sequence[str] = ()) -> None:
        """The ends of a plan are closed; ``on_left`` (in place of an earlier one) is called once no value of it is on its way any
        more.

        ``absent`` could not open the plan. The plan may have been left before, when that was not known yet.
        """
        for recorder in self._recorders.pop(number, ()):
            with suppress(DeviceError):
                recorder.close()
        ends = self._plans.get(number)
        if ends is None or ends.life.state is State.DRAINED:
            self.is_busy |= self._let_go_of_drained()
            on_left()
            return
        self._on_left[number] = on_left
        ends.on(Event.CLOSE)
        ends.go_without(absent)
        self.is_busy = True
        self.serve()

    def abandon(self, number: int) -> None:
        """The plan could not be opened."""
        self.leave(number, lambda: None)

    def serve(self) -> None:
        """Handles records that no step waits for, and plans that are being left. A device that refuses ends a plan only."""
        has_more = is_closing = False
        for number, ends in list(self._plans.items()):
            match ends.life.state:
                case State.OPEN | State.BROKEN:
                    has_more = self._progress(number, ends) or has_more
                case State.CLOSING:
                    is_closing = not self._drain(number, ends) or is_closing
        has_to_wait = self._let_go_of_drained()
        self.is_busy = has_more or is_closing or has_to_wait

    def _progress(self, number: int, ends: DeviceEnds) -> bool:
        try:
            return ends.progress()
        except DeviceError as error:
            self._on_fault(number, str(error))
            return False

    def _drain(self, number: int, ends: DeviceEnds) -> bool:
        """Whether a plan that closes is drained, or lost."""
        try:
            if not ends.drain():
                return False
            ends.on(Event.DRAINED)
        except DeviceError:
            del self._plans[number]
            self._lost.append(ends)
            self._devices.forget(number)
            ends.on(Event.DEVICE_FAILED)
        self._on_left.pop(number)()
        return True

    def _let_go_of_drained(self) -> bool:
        """Gives back what nobody uses any more; whether some of it has to wait for the devices."""
        for number, ends in list(self._plans.items()):
            if ends.life.state is not State.DRAINED:
                continue
            with suppress(DeviceError):  # else it is tried again
                ends.progress()
                if not ends.is_referenced:
                    self._unused.append(ends)
                    del self._plans[number]
                    self._devices.forget(number)
        has_to_wait = self._release_unused()
        return (self._copies is not None and self._copies.pins.collect()) or has_to_wait

    def _release_unused(self) -> bool:
        """Releases plans, if that does not have to wait; whether it does."""
        if not self._unused:
            return False
        with suppress(DeviceError):  # a device that refuses keeps it
            if not all(home.is_idle() for home in self._devices.homes):
                return True
            while self._unused:
                self._unused[-1].on(Event.UNREFERENCED)
                self._unused.pop()
            if not self._plans:
                self._devices.trim()
        return False
