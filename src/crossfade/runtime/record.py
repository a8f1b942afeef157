"""Recording what ran when. Nothing here is touched unless a graph was compiled to record."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from crossfade.plan.actions import COLL_STREAM, MAIN, RECV_STREAM, SEND_STREAM, Action, Verb
from crossfade.plan.spans import Span
from crossfade.runtime.cursor import Round, Step

MAX_SPANS = 200_000
"""The oldest spans of an actor are forgotten beyond this many."""

_STREAMS = {Verb.SEND: SEND_STREAM, Verb.RECV: RECV_STREAM, Verb.COLL: COLL_STREAM}
_KINDS = {Verb.RUN: "compute", Verb.FREE: "compute"}


class Recorder:
    """Collects the spans of one party of one plan, at about 0.3 us for each action (two clock readings and an append).

    ``origin_ns`` is the timeline's zero on the host's monotonic clock, the same for all parties.
    """

    def __init__(self, actor: str, origin_ns: int) -> None:
        self.actor = actor
        self.origin_ns = origin_ns
        self.round = Round(0)
        self._spans: deque[tuple[str, Action, str, str, int, int, int]] = deque(maxlen=MAX_SPANS)

    def wrap(self, step: Step, action: Action, what: str, is_done: Callable[[], bool] | None = None) -> Step:
        """Returns the step, recorded: the time during which it could not run as ``wait``, then the call that succeeded, if it
        carried out the action (``is_done``; None if it always does).
        """
        kind = _KINDS.get(action.verb, "communicate")
        append, now, round_ = self._spans.append, time.monotonic_ns, self.round
        waiting_since = 0

        def recorded() -> bool:
            nonlocal waiting_since
            start = now()
            if not step():
                waiting_since = waiting_since or start
                return False
            execution = round_.number + action.ahead
            if waiting_since:
                append((MAIN, action, what, "wait", execution, waiting_since, start))
                waiting_since = 0
            if is_done is None or is_done():
                append((MAIN, action, what, kind, execution, start, now()))
            return True

        return recorded

    def moved(self, action: Action, what: str) -> Callable[[int, int], None]:
        """For a channel's ``on_moved``: records the transfers that ran in the background, counted from execution 0."""
        execution = 0
        stream = _STREAMS[action.verb]

        def record(start_ns: int, end_ns: int) -> None:
            nonlocal execution
            self._spans.append((stream, action, what, "communicate", execution, start_ns, end_ns))
            execution += 1

        return record

    def add(self, action: Action, what: str, kind: str, execution: int, start_ns: int, end_ns: int) -> None:
        """Records one span directly."""
        self._spans.append((MAIN, action, what, kind, execution, start_ns, end_ns))

    def spans(self) -> list[Span]:
        """What has been recorded, in microseconds since the origin."""
        return [
            Span(self.actor, stream, str(action), what, kind, execution, self._us(start), self._us(end))
            for stream, action, what, kind, execution, start, end in list(self._spans)
        ]

    def _us(self, time_ns: int) -> float:
        return (time_ns - self.origin_ns) / 1000
