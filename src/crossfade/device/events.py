"""A pool of events that the host can poll or wait for."""

from __future__ import annotations

from crossfade.device.driver import Driver
from crossfade.interrupted import brief


class PooledEvent:
    """An event behind all that a stream was given up to some point. It goes back to its pool when it dies, in any thread."""

    __slots__ = ("_event", "_pool")

    def __init__(self, pool: EventPool, event: int) -> None:
        self._pool = pool
        self._event = event

    def has_come(self) -> bool:
        """Whether the device is that far. Raises a `DeviceError` if it will never be."""
        return self._pool.driver.has_happened(self._event)

    def wait(self) -> None:
        """Blocks this thread until the device is that far. Raises a `DeviceError` if it will never be."""
        self._pool.driver.wait_host(self._event)

    def hold(self, stream: int) -> None:
        """Holds a stream until then."""
        self._pool.driver.wait_event(stream, self._event)

    @brief
    def __del__(self) -> None:
        self._pool._take_back(self._event)


class EventPool:
    """Records events on the streams of one device, and uses them again."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self._spare: list[int] = []
        self._is_closed = False

    def at(self, stream: int) -> PooledEvent:
        """An event behind all that the stream was given until now."""
        try:
            number = self._spare.pop()
        except IndexError:
            number = self.driver.create_host_event()
        event = PooledEvent(self, number)
        self.driver.record_event(number, stream)
        return event

    def _take_back(self, event: int) -> None:
        self._spare.append(event)
        if self._is_closed:
            self._destroy_spare()

    def _destroy_spare(self) -> None:
        while self._spare:
            self.driver.destroy_event(self._spare.pop())

    def close(self) -> None:
        """Gives the events back, those of events that are still held when they die. Idempotent."""
        self._is_closed = True
        self._destroy_spare()
