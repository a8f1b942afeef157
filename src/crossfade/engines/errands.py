"""What a driver and its agent on another host say to each other: errands, and what comes of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from crossfade.engines import control
from crossfade.engines.state import ActorState
from crossfade.plan.plan import Plan


@dataclass(frozen=True, slots=True)
class TakeIn:
    """To the agent: a process is going to come with this key. It is an actor, and this is its first message."""

    first: control.Create
    key: bytes
    is_borrowed: bool


@dataclass(frozen=True, slots=True)
class Door:
    """The answer: where it is to come."""

    actor: str
    path: str


@dataclass(frozen=True, slots=True)
class TakenIn:
    """Then: it has come, or why not."""

    actor: str
    pid: int
    error: str = ""


@dataclass(frozen=True, slots=True)
class ToActor:
    """To the agent: pass this on."""

    actor: str
    message: Any


@dataclass(frozen=True, slots=True)
class FromActor:
    """From the agent: an actor has said this."""

    actor: str
    message: Any


@dataclass(frozen=True, slots=True)
class Ended:
    """From the agent: an actor's process has ended, and how."""

    actor: str
    how: str


@dataclass(frozen=True, slots=True)
class Kill:
    """To the agent: end an actor's process."""

    actor: str


@dataclass(frozen=True, slots=True)
class OpenSite:
    """To the agent: make the memory of a plan's rings on this host, and give each of these actors its message."""

    plan: Plan
    host: str
    messages: Mapping[str, control.OpenPlan]


@dataclass(frozen=True, slots=True)
class Look:
    """To the agent: what are the actors doing?"""

    number: int
    timeout_s: float


@dataclass(frozen=True, slots=True)
class Seen:
    """The answer."""

    number: int
    actors: tuple[ActorState, ...]


@dataclass(frozen=True, slots=True)
class AskEnds:
    """To the agent: tell of the actors that are ending now, which others may have noticed."""

    number: int


@dataclass(frozen=True, slots=True)
class EndsTold:
    """Then: that was all."""

    number: int


@dataclass(frozen=True, slots=True)
class AskClock:
    """To the agent: what does your monotonic clock show?"""

    number: int


@dataclass(frozen=True, slots=True)
class Clock:
    """The answer."""

    number: int
    now_ns: int
