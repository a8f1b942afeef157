"""Runs a callback when events of a device complete, above all to tell a reader on the host that its bytes are there.

A GPU cannot post a semaphore, so a thread has to look. The actor's main thread does where it can: its loop spins for a moment
before it sleeps, and asks the oldest job's event on each turn (`Publisher.poll`, 2 us). A thread takes over where it cannot,
because it is in a method or asleep. Why not the thread alone: it would have to get the interpreter lock from a spinning main
thread, which takes up to 5 ms where ``sched_yield`` keeps the lock (Python 3.11), and a wake-up, some 50 us, everywhere. Why not
the main thread alone: a method that works on the CPU or waits in ``.item()`` would hold up what is ready.

So that the thread does not disturb the main thread's looking, it is not woken by a job but by a timer, which each job sets anew
to a little more than the loop's spin: a system call of a microsecond, and nothing else happens while values come and go
quickly. Once awake it waits for events in their order (without the interpreter lock, without a core) until there are none left.

Jobs are done in the order in which they came, each once, by the thread that gets to it first, and never two at a time.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from crossfade.device.events import PooledEvent
from crossfade.errors import DeviceError
from crossfade.host.doorbell import Bell
from crossfade.host.semaphore import full_fence
from crossfade.host.timer import Timer

Done = Callable[[DeviceError | None], None]
"""Told that the device has come to it, or why it never will. Must not block or raise."""

PUBLISH_US = 60.0
"""The loop may be in a method, and look for nothing: then values wait so long, and a little longer, for the thread."""

_GRACE_US = 20.0


class _Job:
    """Something to do once all of the events have come, or never will. All that it holds is released when it is done."""

    __slots__ = ("_keep", "done", "error", "events")

    def __init__(self, events: tuple[PooledEvent, ...], done: Done, keep: Any) -> None:
        self.events = events
        self.done = done
        self.error: DeviceError | None = None
        self._keep = keep

    def is_due(self) -> bool:
        return all(map(self._is_over, self.events))

    def _is_over(self, event: PooledEvent) -> bool:
        try:
            return event.has_come()
        except DeviceError as error:  # of its device; another one may still be at work
            self._note(error)
            return True

    def wait(self) -> None:
        for event in self.events:
            try:
                event.wait()
            except DeviceError as error:
                self._note(error)

    def _note(self, error: DeviceError) -> None:
        self.error = self.error or error.with_traceback(None)  # which would hold a frame, and so this job, in a circle


def _release(error: DeviceError | None) -> None:
    """What the job keeps is released."""


class Publisher:
    """Does jobs when their events have come, in order. One for each process that has a device. ``spin_us``: for how long the
    process's loop looks for work; the thread takes over a little later.
    """

    def __init__(self, bell: Bell, spin_us: float = PUBLISH_US, enter: Callable[[], None] = lambda: None) -> None:
        self._bell = bell  # this process's own doorbell, rung when the thread has done something
        self._enter = enter  # the first thing that the thread does
        self.jobs: deque[_Job] = deque()  # what is to be done; for a quick look at whether there is anything
        self._doing = threading.Lock()
        self._timer = Timer(spin_us + _GRACE_US)
        self._is_awake = False  # the thread looks into the list by itself
        self._is_ending = False
        self._thread = threading.Thread(target=self._run, name="crossfade-publish", daemon=True)
        self._thread.start()

    def submit(self, events: tuple[PooledEvent, ...], done: Done = _release, keep: Any = None) -> None:
        """Adds a job: ``done`` is called, by this thread or another, when the ``events`` have come (none: right after the jobs
        before it). ``keep`` is held until then, such as memory that the device reads or writes.
        """
        self.jobs.append(_Job(events, done, keep))
        if not self._is_awake:
            self._timer.start()

    def poll(self) -> bool:
        """Does what can be done now, without waiting; whether that was anything."""
        if not self.jobs or not self._doing.acquire(False):
            return False
        try:
            return self._do_due()
        finally:
            self._doing.release()

    def _do_due(self) -> bool:
        jobs, has_done = self.jobs, False
        while jobs and jobs[0].is_due():
            job = jobs[0]
            try:
                job.done(job.error)
            except Exception as error:  # a bug, which must not keep what comes behind from being done
                thread = threading.current_thread()  # and no name for the rest: it would be part of a circle
                threading.excepthook(threading.ExceptHookArgs((type(error), error, error.__traceback__, thread)))
            finally:
                jobs.popleft()
            has_done = True
        return has_done

    def _run(self) -> None:
        self._enter()
        while True:
            self._timer.wait()
            self._is_awake = True
            while (job := self._first()) is not None:
                job.wait()
                del job
                with self._doing:
                    has_done = self._do_due()
                if has_done:
                    full_fence()()
                    self._bell.ring_if_asleep()
            if self._is_ending:
                return

    def _first(self) -> _Job | None:
        """The oldest job; None if there is none, and then the thread that adds one sets the timer."""
        while True:
            try:
                return self.jobs[0]
            except IndexError:
                self._is_awake = False
                if not self.jobs:
                    return None
                self._is_awake = True  # one came in between, and its timer may not have been set

    def close(self, timeout_s: float = 0.0) -> bool:
        """Ends the thread once everything is done; whether it has ended. Call it again where it has not. No job may come after."""
        if not self._is_ending:
            self._is_ending = True
            self._timer.ring()
        deadline = time.monotonic() + timeout_s
        self._thread.join(timeout_s)
        while self.jobs and time.monotonic() < deadline:  # a job came while the thread was on its last way out
            self.poll()
        if self._thread.is_alive() or self.jobs:
            return False
        self._timer.close()
        return True
