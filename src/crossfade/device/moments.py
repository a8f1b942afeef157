"""Points of a stream that the host asks about, or a thread waits for."""

from __future__ import annotations

from crossfade.device.driver import Driver
from crossfade.interrupted import brief

__all__ = ["Moment", "Moments"]


class Moment:
    """All that a stream was given up to some point. Its event is used again when nobody holds it any more, in any thread."""

    __slots__ = ("_event", "_moments")

    def __init__(self, moments: Moments, event: int) -> None:
        self._moments = moments
        self._event = event

    def has_come(self) -> bool:
        """Whether the device is that far. Raises a `DeviceError` if it will never be."""
        return self._moments.driver.has_happened(self._event)

    def wait(self) -> None:
        """Blocks this thread until the device is that far. Raises a `DeviceError` if it will never be."""
        self._moments.driver.wait_host(self._event)

    def hold(self, stream: int) -> None:
        """Holds a stream until then."""
        self._moments.driver.wait_event(stream, self._event)

    @brief
    def __del__(self) -> None:
        self._moments._take_back(self._event)


class Moments:
    """Makes moments of one device's streams."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self._spare: list[int] = []
        self._is_closed = False

    def at(self, stream: int) -> Moment:
        """All that the stream was given until now."""
        try:
            event = self._spare.pop()
        except IndexError:
            event = self.driver.create_host_event()
        moment = Moment(self, event)
        self.driver.record_event(event, stream)
        return moment

    def _take_back(self, event: int) -> None:
        self._spare.append(event)
        if self._is_closed:
            self._destroy_spare()

    def _destroy_spare(self) -> None:
        while self._spare:
            self.driver.destroy_event(self._spare.pop())

    def close(self) -> None:
        """Gives the events back, those of moments that are still held when they die. Idempotent."""
        self._is_closed = True
        self._destroy_spare()
