"""What actors, plans and rings are doing at this moment, as data: what ``crossfade.dump`` prints; and what became of actors."""

from __future__ import annotations

from dataclasses import dataclass

from crossfade.errors import ActorDiedError, ActorError, ActorStartError, Failure


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


@dataclass(slots=True)
class Fate:
    """All that the driver keeps of an actor that has ended, to answer later requests with an error."""

    name: str
    pid: int
    is_created: bool = False  # whether its constructor has returned
    start_failure: Failure | None = None  # the error that the constructor raised
    end: str = ""  # how its process ended; empty as long as it has not ended

    @property
    def is_over(self) -> bool:
        return bool(self.end or self.start_failure)

    def error(self) -> ActorError:
        if self.start_failure is not None:
            cause = self.start_failure.to_error()
            error = ActorStartError(f"actor {self.name} could not be started: {cause}", actor=self.name)
            error.__cause__ = cause
            return error
        told = f"actor {self.name} is dead: {self.end}"
        if not self.is_created:
            return ActorStartError(f"{told} before its constructor had returned", actor=self.name)
        return ActorDiedError(told, actor=self.name)

    def obituary(self) -> ActorState:
        """Describes the dead actor for a report of what actors are doing."""
        return ActorState(self.name, self.pid, f"is dead: {self.end}")
