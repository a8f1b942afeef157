"""A `HostDriver` whose streams run when a test says so: what a host sees that is ahead of its device."""

from __future__ import annotations

import threading
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from typing import NoReturn

from crossfade.device.host_driver import HostDriver, SharedRange
from crossfade.errors import DeviceError
from crossfade.host.memory import Memory

LIMIT_S = 20.0

Operation = Callable[[], bool]
"""Done at the head of its stream; False if it still has to wait."""


class LateDriver(HostDriver):
    """Operations of a held stream stay where they are until the stream is let go, or stepped."""

    def __init__(self) -> None:
        super().__init__(LIMIT_S)
        self.error: DeviceError | None = None  # what asking for events raises from now on
        self.max_pinned = 1 << 30  # ranges of the host's memory at a time
        self.num_blocked = 0  # threads that wait for an event
        self._held: set[int] = set()
        self._queues: defaultdict[int, deque[Operation]] = defaultdict(deque)
        self._records: Counter[int] = Counter()  # of each event: how often it was recorded
        self._happened: Counter[int] = Counter()  # and which of those has happened
        self._changed = threading.Condition(threading.RLock())

    # by the test

    def hold(self, *streams: int) -> None:
        """What these streams are given from now on has to wait."""
        with self._changed:
            self._held.update(streams)

    def let_go(self, *streams: int) -> None:
        with self._changed:
            self._held.difference_update(streams)
            self._run()

    def step(self, stream: int, num: int = 1) -> None:
        """Does the next operations of a held stream."""
        with self._changed:
            for _ in range(num):
                assert self._queues[stream][0]()
                self._queues[stream].popleft()
            self._run()

    def break_down(self, error: DeviceError) -> None:
        """No operation that is enqueued is ever done, and everybody who asks is told why."""
        with self._changed:
            self.error = error
            self._queues.clear()
            self._changed.notify_all()

    def give(self, stream: int, action: Callable[[], None]) -> None:
        """Enqueues anything, such as a kernel."""

        def operation() -> bool:
            action()
            return True

        self._enqueue(stream, operation)

    def _refuse(self) -> NoReturn:
        raise DeviceError(str(self.error))  # a new one: an error holds the frames that it came through

    # the driver

    def _enqueue(self, stream: int, operation: Operation) -> None:
        with self._changed:
            if self.error is not None:
                self._refuse()
            self._queues[stream].append(operation)
            self._run()

    def _run(self) -> None:
        has_moved = True
        while has_moved:
            has_moved = False
            for stream, queue in list(self._queues.items()):
                while queue and stream not in self._held and queue[0]():
                    queue.popleft()
                    has_moved = True
        self._changed.notify_all()

    def copy(self, target: int, source: int, size_bytes: int, stream: int) -> None:
        self.give(stream, lambda: HostDriver.copy(self, target, source, size_bytes, stream))

    def record_event(self, event: int, stream: int) -> None:
        with self._changed:
            self._records[event] += 1
            number = self._records[event]

            def happen() -> None:
                self._happened[event] = max(self._happened[event], number)

            self.give(stream, happen)

    def wait_event(self, stream: int, event: int) -> None:
        with self._changed:
            number = self._records[event]
            self._enqueue(stream, lambda: self._happened[event] >= number)

    def is_idle(self, stream: int) -> bool:
        with self._changed:
            return not self._queues[stream]

    def has_happened(self, event: int) -> bool:
        with self._changed:
            if self.error is not None:
                self._refuse()
            return self._happened[event] >= self._records[event]

    def wait_host(self, event: int) -> None:
        with self._changed:
            number = self._records[event]
            self.num_blocked += 1
            try:
                if not self._changed.wait_for(lambda: self.error or self._happened[event] >= number, LIMIT_S):
                    raise DeviceError("nobody let the stream go")
                if self.error is not None:
                    self._refuse()
            finally:
                self.num_blocked -= 1

    def map_host(self, memory: Memory, offset: int, size_bytes: int, label: str) -> SharedRange:
        if len(self.ledger.held("mapped")) >= self.max_pinned:
            raise DeviceError(f"pinning {size_bytes} bytes of {label} failed: out of memory")
        return super().map_host(memory, offset, size_bytes, label)
