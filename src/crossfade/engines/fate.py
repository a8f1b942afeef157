"""What became of an actor: all that the driver keeps of one that has ended, for whoever asks it for something afterwards."""

from __future__ import annotations

from dataclasses import dataclass

from crossfade.engines.state import ActorState
from crossfade.errors import ActorDiedError, ActorError, ActorStartError, Failure

__all__ = ["Fate"]


@dataclass(slots=True)
class Fate:
    """What became of an actor.

    Attributes:
        name: the actor's name.
        pid: its process.
        is_created: its constructor has returned.
        start_failure: what that raised.
        end: how its process ended; empty as long as it has not.
    """

    name: str
    pid: int
    is_created: bool = False
    start_failure: Failure | None = None
    end: str = ""

    @property
    def is_over(self) -> bool:
        """Whether nothing can be asked of the actor any more."""
        return bool(self.end or self.start_failure)

    def error(self) -> ActorError:
        """The error for who asks something of it."""
        error: ActorError
        if self.start_failure is not None:
            cause = self.start_failure.to_error()
            error = ActorStartError(f"actor {self.name} could not be started: {cause}")
            error.__cause__ = cause
        elif not self.is_created:
            error = ActorStartError(f"actor {self.name} is dead: {self.end} before its constructor had returned")
        else:
            error = ActorDiedError(f"actor {self.name} is dead: {self.end}")
        error.actor = self.name
        return error

    def obituary(self) -> ActorState:
        """What it is doing, once it has ended."""
        return ActorState(self.name, self.pid, f"is dead: {self.end}")
