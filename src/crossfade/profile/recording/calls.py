"""Events, waits and synchronisations, as torch reports them to ``torch.cuda._gpu_trace``: which event, on which stream.

A trace has the same calls, without events and streams. By an entry's thread and time `traces.exact` finds its call.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from crossfade.profile.traces.roles import Role

_REGISTRIES: dict[str, Callable[[CallLog], Callable[..., None]]] = {
    "EventRecordCallbacks": lambda log: log.event_record,
    "EventWaitCallbacks": lambda log: log.event_wait,
    "StreamSynchronizationCallbacks": lambda log: log.stream_synchronization,
    "EventSynchronizationCallbacks": lambda log: log.event_synchronization,
}


class CallLog:
    """Collects entries from `open` to `close`.

    An entry is [role, thread, time in ns, event, stream]; events and streams are the driver's handles, 0 where there is none.
    """

    def __init__(self, see: Callable[[int], None]) -> None:
        """``see`` is told each stream while it is in use."""
        self._see = see
        self.entries: list[tuple[int, int, int, int, int]] = []
        self._registered: list[tuple[list[Any], Callable[..., None]]] = []

    def open(self, gpu_trace: Any) -> None:
        """Begins to listen to ``torch.cuda._gpu_trace``, or what stands for it. A registry that it does not have is left out."""
        for name, callback_of in _REGISTRIES.items():
            registry = getattr(gpu_trace, name, None)
            if registry is not None:
                callback = callback_of(self)
                registry.add_callback(callback)
                self._registered.append((registry.callback_list, callback))

    def close(self) -> None:
        """Listens no longer."""
        for callbacks, callback in self._registered:
            callbacks.remove(callback)
        self._registered.clear()

    def event_record(self, event: int, stream: int) -> None:
        self._add(Role.RECORD, event, stream)

    def event_wait(self, event: int, stream: int) -> None:
        self._add(Role.WAIT_EVENT, event, stream)

    def stream_synchronization(self, stream: int) -> None:
        self._add(Role.SYNC_STREAM, 0, stream)

    def event_synchronization(self, event: int) -> None:
        self._add(Role.SYNC_EVENT, event, 0)

    def _add(self, role: Role, event: int, stream: int) -> None:
        self._see(stream)
        self.entries.append((int(role), threading.get_native_id(), time.time_ns(), event, stream))
