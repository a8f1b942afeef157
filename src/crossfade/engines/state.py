"""What actors, plans and rings are doing at this moment, as data: what ``crossfade.dump`` prints."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ActorState", "PartState", "RingState", "State"]


@dataclass(frozen=True, slots=True)
class PartState:
    """How far one party has come in one plan.

    Attributes:
        plan: the plan's number in its engine.
        num_rounds: rounds that it has finished.
        action: the action at which it stands, or which it carries out; empty between two rounds.
        fault: why it has left the plan, if it has.
    """

    plan: int
    num_rounds: int
    action: str = ""
    fault: str = ""


@dataclass(frozen=True, slots=True)
class ActorState:
    """What one actor is doing.

    Attributes:
        actor: its id.
        pid: its process.
        doing: ``waits``, ``runs Worker0.forward (node n3)``, ``is dead: ...``
        parts: where it stands in each of its plans.
        stacks: the stack of each of its threads, as text, innermost call last; empty if it could not tell.
    """

    actor: str
    pid: int
    doing: str
    parts: tuple[PartState, ...] = ()
    stacks: str = ""


@dataclass(frozen=True, slots=True)
class RingState:
    """One reader's side of one ring.

    Attributes:
        channel: the channel's id.
        writer, reader: its ends.
        depth: values that it holds at most.
        num_unread: values that were written and that the reader has not taken.
    """

    channel: str
    writer: str
    reader: str
    depth: int
    num_unread: int


@dataclass(frozen=True, slots=True)
class State:
    """Everything that an engine can tell.

    Attributes:
        actors: each actor.
        rings: the shared-memory rings of each open plan, by the plan's number.
    """

    actors: tuple[ActorState, ...]
    rings: dict[int, tuple[RingState, ...]]
