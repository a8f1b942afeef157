"""Captured graphs of the fake machine: what is collected, what a GPU would refuse, and what one launch enqueues."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from crossfade.testing.fake.clocks import Clock, join
from crossfade.testing.fake.machine import Fault, Mark, Operation


class Capture:
    """The operations that are enqueued on ``origin``, and on streams that wait for its events, from the capture's begin on."""

    def __init__(self, origin: int, name: str) -> None:
        self.origin = origin
        self._name = name
        self._streams = {origin}
        self._operations: list[tuple[int, Operation]] = []

    def has(self, stream: int) -> bool:
        """Whether the stream belongs to it by now."""
        return stream in self._streams

    def take(self, stream: int, operation: Operation) -> bool:
        """Collects the operation if it belongs to the capture."""
        after = operation.after
        is_inside = after is not None and any(done.records is after for _, done in self._operations)
        if is_inside:
            self._streams.add(stream)
        if stream not in self._streams:
            return False
        if after is not None and not is_inside:
            what = f"'{operation.label}' is captured in {self._name}, and the event was recorded outside"
            raise Fault("capture", what, operation.label)
        self._operations.append((stream, operation))
        return True

    def end(self) -> None:
        """Reports a stream whose last operation the origin does not wait for: a GPU refuses that."""
        clocks: dict[int, Clock] = {}
        marks: dict[int, Clock] = {}
        last: dict[int, Operation] = {}
        for stream, operation in self._operations:
            clock = clocks.setdefault(stream, {})
            if operation.after is not None:
                join(clock, marks[id(operation.after)])
            clock[str(stream)] = clock.get(str(stream), 0) + 1
            last[stream] = operation
            if operation.records is not None:
                marks[id(operation.records)] = dict(clock)
        known = clocks.get(self.origin, {})
        for stream, clock in clocks.items():
            if known.get(str(stream), 0) < clock[str(stream)]:
                label = last[stream].label
                raise Fault("capture", f"{self._name} ends, and nothing in it waits for '{label}'", label)

    def launch(self, stream: str, host: Clock) -> Iterator[tuple[int | None, Operation]]:
        """One launch's operations, each with the stream that it was captured on, None for the one that it is launched on.

        A branch that was captured on another stream has a timeline of its own: a launch does not wait for what else is on that
        stream, and that does not wait for the launch.
        """
        start = Mark(None, stream)
        yield None, Operation(f"launch a graph on {stream}", stream, host, records=start)
        marks: dict[int, Mark] = {}
        begun = {self.origin}
        for own, operation in self._operations:
            is_branch = own != self.origin
            line = f"{operation.stream} of {self._name}" if is_branch else stream
            if own not in begun:
                begun.add(own)
                yield own, Operation(f"begin a graph on {operation.stream}", line, host, after=start)
            records, after = operation.records, operation.after
            if records is not None:
                records = marks[id(operation.records)] = Mark(None, records.label)
            if after is not None:
                after = marks[id(after)]
            yield own if is_branch else None, replace(operation, stream=line, host=host, records=records, after=after)
