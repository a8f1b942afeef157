"""The driver's agent on another host: it has that host's actors as the driver has its own, and passes on what both sides say.

It starts nothing by itself, and ends with the connection to the driver: its actors see that as they would see the driver's end.
"""

from __future__ import annotations

import pickle
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from crossfade.engines import control, errands
from crossfade.engines.admission import Admission
from crossfade.engines.local_processes import AnyProcess, Processes
from crossfade.engines.site import Site
from crossfade.errors import ActorError, Failure
from crossfade.host.frames import FrameError
from crossfade.host.sockets import Connection
from crossfade.host.tcp import Meeting, Stream

_ADMISSION_S = 60.0


class _Relayed(Processes):
    """The actors of this host; what they say is for the driver."""

    tell: Callable[[Any], None]

    def took(self, process: AnyProcess, reply: Any) -> None:
        if isinstance(reply, control.Created):
            process.fate.is_created = reply.failure is None
        self.tell(errands.FromActor(process.name, reply))


class Agent:
    """Waits at ``port`` of this address for the driver, who has the key, and serves it in a thread. ``on_over`` is called at the
    end.
    """

    def __init__(self, address: str, key: bytes, on_over: Callable[[], None]) -> None:
        self._key = key
        self._on_over = on_over
        self._connection: Connection | None = None
        self._is_over = False
        self._processes = _Relayed(lambda: [self], spin_us=0.0, log_to_driver=False)
        self._processes.tell = self._tell
        self._meeting = Meeting(address, key, self._on_come)
        self.port = self._meeting.port

    def _on_come(self, name: str, stream: Stream) -> bool:
        if self._connection is not None:
            return False
        self._connection = Connection(stream.socket, self._key, "actor")
        self._meeting.close()
        self._processes.doorbell.watch(self._connection.fileno(), self._converse)
        threading.Thread(target=self._serve, args=(stream,), name="crossfade-agent", daemon=True).start()
        return True

    def _serve(self, stream: Stream) -> None:
        doorbell = self._processes.doorbell
        doorbell.wait_until(lambda: self._is_over)
        self._processes.close(lambda: None)
        stream.close()
        self._on_over()

    def _tell(self, message: Any) -> None:
        connection = self._connection
        if connection is None or self._is_over:
            return
        try:
            control.post(connection, message)
        except OSError:
            self._is_over = True
        else:
            self._processes.doorbell.watch_room(connection.fileno(), is_wanted=connection.has_unsent)

    def _converse(self) -> None:
        connection = self._connection
        if connection is None or self._is_over:
            return
        try:
            if connection.has_unsent:
                connection.flush()
                self._processes.doorbell.watch_room(connection.fileno(), is_wanted=connection.has_unsent)
            while (message := connection.take()) is not None:
                self._obey(pickle.loads(message.payload))
        except (FrameError, OSError):
            self._is_over = True
        if connection.is_closed:
            self._is_over = True
        if self._is_over:
            self._processes.doorbell.unwatch(connection.fileno())

    def _obey(self, errand: Any) -> None:
        match errand:
            case errands.ToActor(actor, message):
                self._processes.post(actor, message)
            case errands.TakeIn():
                self._in_thread(self._take_in, errand)
            case errands.OpenSite():
                self._open_site(errand)
            case errands.Kill(actor):
                self._processes.kill(actor)
            case errands.AskClock(number):
                self._tell(errands.Clock(number, time.monotonic_ns()))
            case errands.Look():
                self._in_thread(self._look, errand)
            case errands.AskEnds():
                self._in_thread(self._tell_ends, errand)

    def _in_thread(self, function: Callable[[Any], None], errand: Any) -> None:
        threading.Thread(target=function, args=(errand,), name="crossfade-errand", daemon=True).start()

    def _take_in(self, errand: errands.TakeIn) -> None:
        actor = errand.first.actor
        try:
            with Admission(errand.key) as admission:
                self._tell(errands.Door(actor, admission.path))
                self._processes.start(
                    actor,
                    errand.first,
                    lambda fds: admission.admit(fds, lambda: None, _ADMISSION_S, is_borrowed=errand.is_borrowed),
                )
            self._tell(errands.TakenIn(actor, self._processes.living[actor].pid))
        except Exception as error:  # whatever it was, the driver waits for an answer
            self._tell(errands.TakenIn(actor, 0, f"{type(error).__name__}: {error}"))

    def _open_site(self, errand: errands.OpenSite) -> None:
        """An actor that cannot be given its part answers as if it had tried."""
        try:
            with ExitStack() as undo:
                Site(errand.plan, errand.host, undo).hand_out(self._processes, errand.messages)
        except Exception as error:  # as above
            for actor, message in errand.messages.items():
                failure = Failure.capture(error, actor=actor, node=f"making its rings on {errand.host}")
                self._tell(errands.FromActor(actor, control.Opened(message.number, failure)))

    def _look(self, errand: errands.Look) -> None:
        self._tell(errands.Seen(errand.number, tuple(self._processes.look(errand.timeout_s / 2))))

    def _tell_ends(self, errand: errands.AskEnds) -> None:
        self._processes.hear()
        self._processes.bury_ending(list(self._processes.living))
        self._tell(errands.EndsTold(errand.number))

    # What its actors have to say

    def receive(self, actor: str, reply: Any) -> None:
        """Nothing: `_Relayed` has told it."""

    def lose(self, actor: str, error: ActorError) -> None:
        self._tell(errands.Ended(actor, self._processes.end_of(actor)))
