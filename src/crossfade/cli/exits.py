"""What ends a command before it is done: the errors that `crossfade.cli.main` turns into exit codes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Self

PROBLEM = 1
USERS_MISTAKE = 2
INTERRUPTED = 130
"""What shells say of a process that SIGINT ended."""


class UsersMistake(Exception):
    """Something about the arguments, or about what they name; the message ends in a hint."""

    def __init__(self, message: str, *, hint: str) -> None:
        super().__init__(f"{message}\nhint: {hint}")

    @classmethod
    def of(cls, error: Exception, before: str = "", *, hint: str = "see above") -> Self:
        """What an error says, behind ``before``; ``hint`` is for those that have none."""
        message, _, own = str(error).partition("\nhint: ")
        return cls(f"{before}{message}", hint=own or hint)


@contextmanager
def told(problem: str, *, hint: str) -> Iterator[None]:
    """An error of the operating system inside of this is the user's mistake: ``problem``, and what the system calls it."""
    try:
        yield
    except OSError as error:
        raise UsersMistake(f"{problem}: {error.strerror}", hint=hint) from None


class WrongResult(Exception):
    """A value that came back is not what a plain computation gives: a bug in crossfade."""

    def __init__(self, what: str, found: object, expected: object) -> None:
        super().__init__(
            f"{what} is {_short(found)}, and should be {_short(expected)}\nhint: this is a bug in crossfade; please report it"
        )


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
