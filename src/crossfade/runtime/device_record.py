"""Recording what ran when on a device, beside what `crossfade.runtime.record` records of the host.

A span lies between two events on a stream: a method's kernels on the stream that computes, copies on the streams that copy.
Recording one costs the host two calls and waits for nothing; its time is computed when it is asked for. Nothing here exists
unless a graph was compiled to record.

What a method enqueues on streams of its own is not seen, unless it joins them, as it should, before it returns.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

from crossfade.device.driver import TimedDriver
from crossfade.device.recorded import Around
from crossfade.plan.actions import Action
from crossfade.plan.device_streams import DeviceStream
from crossfade.plan.spans import COMMUNICATE, COMPUTE, Span
from crossfade.runtime.cursor import Round, Step
from crossfade.runtime.device_clock import DeviceClock, Trail
from crossfade.runtime.record import Recorder

MAX_DEVICE_SPANS = 4096
"""The oldest spans of an actor's device are forgotten beyond this many: each has two events, all made beforehand."""


class Opened(NamedTuple):
    """A span that has begun."""

    stream: int
    # begin, end: its events.
    begin: int
    end: int


_Recorded: TypeAlias = tuple[Opened, DeviceStream, Action, str, int, int]


class _Copies:
    """Spans of what one action enqueues. See `crossfade.device.recorded.Around`."""

    __slots__ = ("_action", "_recorder", "_role", "_round", "_what")

    def __init__(self, recorder: DeviceRecorder, round_: Round, role: DeviceStream, action: Action, what: str) -> None:
        self._recorder, self._round = recorder, round_
        self._role, self._action, self._what = role, action, what

    @property
    def execution(self) -> int:
        return self._round.number + self._action.ahead

    def __call__(self, stream: int, execution: int | None = None) -> Callable[[int], None]:
        opened, number = self._recorder.begin(stream), self.execution if execution is None else execution
        return lambda size_bytes: self._recorder.end(opened, self._role, self._action, self._what, number, size_bytes)


class DeviceRecorder:
    """Collects the spans of one device of one party of one plan. Any thread may use it, as those of collectives do."""

    def __init__(
        self,
        driver: TimedDriver,
        recorder: Recorder,
        *,
        max_spans: int = MAX_DEVICE_SPANS,
        now_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._driver = driver
        self._recorder = recorder
        self._clock = DeviceClock(driver, now_ns)
        self._spare = [(driver.create_timer(), driver.create_timer()) for _ in range(max_spans)]
        self._recorded: deque[_Recorded] = deque()
        self._is_closed = False
        self._lock = threading.Lock()

    def begin(self, stream: int) -> Opened | None:
        """Enqueues the beginning of a span; None where no more is recorded. The caller calls `end` as well, whatever
        happens in between.
        """
        with self._lock:
            if self._is_closed:
                return None
            begin, end = self._spare.pop() if self._spare else self._recorded.popleft()[0][1:]
            self._driver.record_event(begin, stream)
        return Opened(stream, begin, end)

    def end(
        self, opened: Opened | None, role: DeviceStream, action: Action, what: str, execution: int, size_bytes: int = 0
    ) -> None:
        """Enqueues the end of a span."""
        if opened is None:
            return
        with self._lock:
            if self._is_closed:  # meanwhile
                self._destroy(*opened[1:])
                return
            self._driver.record_event(opened.end, opened.stream)
            self._recorded.append((opened, role, action, what, execution, size_bytes))

    def around(self, role: DeviceStream, action: Action, what: str) -> Around:
        """For code that enqueues copies now and then: what begins a span on a stream, and gives what ends it."""
        return _Copies(self, self._recorder.round, role, action, what)

    def wrap(self, step: Step, action: Action, what: str, stream: int) -> Step:
        """The same step, which never has to wait, with what it enqueues on the stream as one span that computes."""
        begin, end, round_ = self.begin, self.end, self._recorder.round

        def recorded() -> bool:
            opened = begin(stream)
            try:
                return step()
            finally:
                end(opened, DeviceStream.COMPUTE, action, what, round_.number + action.ahead)

        return recorded

    def spans(self) -> list[Span]:
        """What has run to its end, in the order in which it was enqueued, in microseconds since the recorder's zero."""
        driver, reading = self._driver, self._clock.read()
        if reading is None:
            return []
        trail = Trail(driver, reading.timer)
        with self._lock:  # the last are the nearest; meanwhile no event is used again
            ended = [each for each in reversed(self._recorded) if driver.has_happened(each[0].end)]
            places_us = [(trail.place_us(each[0].begin), driver.elapsed_us(*each[0][1:])) for each in ended]
        ratio = self._clock.ratio(reading, trail)
        read_us = (reading.host_ns - self._recorder.origin_ns) / 1e3
        found = [
            self._span(each, read_us + start_us * ratio, read_us + (start_us + duration_us) * ratio)
            for each, (start_us, duration_us) in zip(ended, places_us, strict=True)
        ]
        return found[::-1]

    def _span(self, recorded: _Recorded, start_us: float, end_us: float) -> Span:
        _, role, action, what, execution, size_bytes = recorded
        kind = COMPUTE if role is DeviceStream.COMPUTE else COMMUNICATE
        return Span(self._recorder.actor, role.value, str(action), what, kind, execution, start_us, end_us, size_bytes)

    def close(self) -> None:
        """Gives all events back; what is enqueued from now on is not recorded. Idempotent."""
        with self._lock:
            self._is_closed = True
            self._spare += [recorded[0][1:] for recorded in self._recorded]
            self._recorded.clear()
            while self._spare:
                self._destroy(*self._spare.pop())
            self._clock.close()

    def _destroy(self, *timers: int) -> None:
        for timer in timers:
            self._driver.destroy_event(timer)
