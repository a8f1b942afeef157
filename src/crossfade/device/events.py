"""A pool of events that the host can poll; those that are made for it can also be waited for."""

from __future__ import annotations

from crossfade.device.driver import Driver
from crossfade.interrupted import brief


class PooledEvent:
    """An event behind all that a stream was given up to some point. It goes back to its pool when it dies, in any thread."""

    __slots__ = ("_event", "_pool", "_spare")

    def __init__(self, pool: EventPool, event: int, spare: list[int]) -> None:
        self._pool = pool
        self._event = event
        self._spare = spare

    def has_come(self) -> bool:
        """Whether the device is that far. Raises a `DeviceError` if it will never be."""
        return self._pool.driver.has_happened(self._event)

    def wait(self) -> None:
        """Blocks this thread until the device is that far; only of an event that ``is_waited``. Raises a `DeviceError` if it will
        never be.
        """
        assert self._pool.is_for_waits(self._spare), "this event is only polled"
        self._pool.driver.wait_host(self._event)

    def hold(self, stream: int) -> None:
        """Holds a stream until then."""
        self._pool.driver.wait_event(stream, self._event)

    @brief
    def __del__(self) -> None:
        self._spare.append(self._event)
        if self._pool.is_closed:
            self._pool.destroy_spare()


class EventPool:
    """Records events on the streams of one device, and uses them again."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self._polled: list[int] = []  # those that nobody uses
        self._waited: list[int] = []
        self.is_closed = False

    def at(self, stream: int, *, is_waited: bool = False) -> PooledEvent:
        """An event behind all that the stream was given until now. Only where it ``is_waited`` a thread may wait for it, and then
        recording it may block (`Driver.create_host_event`).
        """
        spare = self._waited if is_waited else self._polled
        try:
            number = spare.pop()
        except IndexError:
            number = self.driver.create_host_event() if is_waited else self.driver.create_event()
        event = PooledEvent(self, number, spare)
        self.driver.record_event(number, stream)
        return event

    def is_for_waits(self, spare: list[int]) -> bool:
        """Whether the events that end in this list can be waited for."""
        return spare is self._waited

    def destroy_spare(self) -> None:
        """Gives those back that nobody uses."""
        for spare in (self._polled, self._waited):
            while spare:
                self.driver.destroy_event(spare.pop())

    def close(self) -> None:
        """Gives the events back, those of events that are still held when they die. Idempotent."""
        self.is_closed = True
        self.destroy_spare()
