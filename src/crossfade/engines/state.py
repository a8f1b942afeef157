"""What actors, plans and rings are doing at this moment, as data: what ``crossfade.dump`` prints."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ActorState", "PartState", "RingState", "State"]


@dataclass(frozen=True, slots=True)
class PartState:
    """How far one party has come in one plan."""

    plan: int
    num_rounds: int  # rounds that it has finished
    action: str = ""  # the action at which it stands, or which it carries out; empty between two rounds
    fault: str = ""  # why it has left the plan, if it has


@dataclass(frozen=True, slots=True)
class ActorState:
    """What one actor is doing."""

    actor: str
    pid: int
    doing: str  # ``waits``, ``runs Worker0.forward (node n3)``, ``is dead: ...``
    parts: tuple[PartState, ...] = ()  # where it stands in each of its plans
    stacks: str = ""  # the stack of each of its threads, as text, innermost call last; empty if it could not tell


@dataclass(frozen=True, slots=True)
class RingState:
    """One reader's side of one ring."""

    channel: str
    # writer, reader: its ends.
    writer: str
    reader: str
    depth: int  # values that it holds at most
    num_unread: int  # values that were written and that the reader has not taken


@dataclass(frozen=True, slots=True)
class State:
    """Everything that an engine can tell."""

    actors: tuple[ActorState, ...]
    rings: dict[int, tuple[RingState, ...]]  # the shared-memory rings of each open plan, by the plan's number
