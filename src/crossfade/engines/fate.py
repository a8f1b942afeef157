"""What became of an actor: all that the driver keeps of an actor that has ended, to answer later requests with an error."""

from __future__ import annotations

from dataclasses import dataclass

from crossfade.engines.state import ActorState
from crossfade.errors import ActorDiedError, ActorError, ActorStartError, Failure

__all__ = ["Fate"]


@dataclass(slots=True)
class Fate:
    """The state of an actor, as far as its start and its end are concerned."""

    name: str
    pid: int
    is_created: bool = False  # whether its constructor has returned
    start_failure: Failure | None = None  # the error that the constructor raised
    end: str = ""  # how its process ended; empty as long as it has not ended

    @property
    def is_over(self) -> bool:
        return bool(self.end or self.start_failure)

    def error(self) -> ActorError:
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
        """Describes the dead actor for a report of what actors are doing."""
        return ActorState(self.name, self.pid, f"is dead: {self.end}")
