"""The life of what a process holds of a plan on its devices: ends of edges, ends of collectives. A pure table, no device.

::

    open ──────── close ───────▶ closing ── drained ──▶ drained ── unreferenced ──▶ released
      │                             ▲  │
      └─ party or peer died, ─▶ broken │
         fault              (close)    └── device failed ──▶ lost

- *open*: values are written and read.
- *broken*: a party of the plan is gone, or its program met a fault. Calls raise; the plan is not closed yet.
- *closing*: closed by this side. Values may be on their way, and streams may wait for them.
- *drained*: no value is on its way. Tensors that came through may be in use still.
- *released*: everything was given back.
- *lost*: the device refused to drain. It may still use the memory, which is therefore never given back.

`Life.on` takes an event and says which actions are due, in order. An owner performs each of them on every end that it has.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Final


class State(StrEnum):
    """Where a life stands; the head of this file draws it."""

    OPEN = "open"
    BROKEN = "broken"
    CLOSING = "closing"
    DRAINED = "drained"
    RELEASED = "released"
    LOST = "lost"


class Event(StrEnum):
    """What happens to it."""

    FAULT = "fault"  # this side cannot continue: its program, or what moves values
    PEER_DIED = "peer died"  # a party of the plan died
    CLOSE = "close"  # this side closes
    DRAINED = "drained"  # no value is on its way, and the device has done everything that it was given
    DEVICE_FAILED = "device failed"  # the device refused what draining takes
    UNREFERENCED = "unreferenced"  # no tensor is in use any more, and nobody looks at the signals


class Action(StrEnum):
    """What an end has to do."""

    END = "end"  # the other sides hear that nothing more comes from here
    MUTE = "mute"  # ends of the dead peer tell it nothing any more, and count its side as closed
    REFUSE = "refuse"  # calls raise `ChannelBroken` from now on
    DRAIN = "drain"  # from now on the owner tries, now and then, to drain
    NOTIFY = "notify"  # the other sides need not wait for this one, whose device does nothing more
    RELEASE = "release"  # memory and events go back


_S, _E, _A = State, Event, Action

TABLE: Final[Mapping[tuple[State, Event], tuple[State, tuple[Action, ...]]]] = {
    (_S.OPEN, _E.FAULT): (_S.BROKEN, (_A.END,)),
    (_S.OPEN, _E.PEER_DIED): (_S.BROKEN, (_A.MUTE, _A.REFUSE)),
    (_S.OPEN, _E.CLOSE): (_S.CLOSING, (_A.DRAIN,)),
    (_S.BROKEN, _E.FAULT): (_S.BROKEN, (_A.END,)),
    (_S.BROKEN, _E.PEER_DIED): (_S.BROKEN, (_A.MUTE, _A.REFUSE)),
    (_S.BROKEN, _E.CLOSE): (_S.CLOSING, (_A.DRAIN,)),
    (_S.CLOSING, _E.FAULT): (_S.CLOSING, (_A.END,)),
    (_S.CLOSING, _E.PEER_DIED): (_S.CLOSING, (_A.MUTE, _A.REFUSE)),
    (_S.CLOSING, _E.DRAINED): (_S.DRAINED, ()),
    (_S.CLOSING, _E.DEVICE_FAILED): (_S.LOST, (_A.NOTIFY,)),
    (_S.DRAINED, _E.PEER_DIED): (_S.DRAINED, (_A.MUTE, _A.REFUSE)),
    (_S.DRAINED, _E.UNREFERENCED): (_S.RELEASED, (_A.RELEASE,)),
}
"""(state, event) to (next state, actions). An event that a state does not have changes nothing and asks for nothing."""


class Life:
    """One life. Its owner takes care that events come one after the other."""

    def __init__(self) -> None:
        self.state = State.OPEN

    def on(self, event: Event) -> tuple[Action, ...]:
        """Notes the event, and returns what is to be done."""
        self.state, actions = TABLE.get((self.state, event), (self.state, ()))
        return actions
