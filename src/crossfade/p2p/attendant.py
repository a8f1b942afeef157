"""A thread that keeps transfers going while the program's threads are busy with something else."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from contextlib import suppress

from crossfade.device.driver import Driver
from crossfade.errors import CrossfadeError

_GRACE_S = 0.002
"""How long a transfer waits for the program's own threads, which are quicker where they wait for it anyway."""

_TICK_S = 0.25
"""How often it looks while streams wait ahead, which nothing wakes it for."""

_MOST_GRACES = 50
"""How often in a row it is put off because the program has begun another one."""


class Attendant:
    """Sleeps until something may need it. ``is_quiet`` says whether nothing does; ``attend`` works, and waits, until then, or until
    a thread of the program waits. It must not raise. While the program goes on beginning transfers, which handles what has come,
    it works rarely: it would only take a core from the program. Once streams wait ahead, ``tick`` is called now and then.
    """

    def __init__(
        self,
        drivers: Iterable[Driver],
        is_quiet: Callable[[], bool],
        attend: Callable[[], None],
        tick: Callable[[], object],
    ) -> None:
        self._drivers = list(drivers)
        self._is_quiet = is_quiet
        self._attend = attend
        self._tick = tick
        self._has_ticks = False
        self._wanted = threading.Event()
        self._ended = threading.Event()
        self._num_calls = 0
        self._thread: threading.Thread | None = None

    def call(self) -> None:
        """A transfer has begun."""
        self._num_calls += 1
        if not self._wanted.is_set() and not self._is_quiet():
            self._wanted.set()
            self._start()

    def watch(self) -> None:
        """A stream waits ahead."""
        if not self._has_ticks:
            self._has_ticks = True
            self._wanted.set()
            self._start()

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="crossfade-p2p", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        for driver in self._drivers:
            driver.enter_thread()
        num_graces = 0
        while True:
            while not self._wanted.wait(_TICK_S if self._has_ticks else None):
                with suppress(CrossfadeError):  # which the program's own calls meet, too
                    self._tick()
            num_calls = self._num_calls
            if self._ended.wait(_GRACE_S):
                return
            if num_calls != self._num_calls and num_graces < _MOST_GRACES:
                num_graces += 1
                continue
            num_graces = 0
            if self._is_quiet():
                self._wanted.clear()
                if self._ended.is_set():  # `close` has set both
                    return
                if self._is_quiet():  # else a transfer began in between, and saw the event set
                    continue
                self._wanted.set()
            self._attend()

    def close(self) -> None:
        """Ends the thread, which `attend` must be about to leave. Idempotent."""
        self._ended.set()
        self._wanted.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
