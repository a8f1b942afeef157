"""What ends a command before it is done: the errors that `crossfade.cli.main` turns into exit codes."""

from __future__ import annotations

__all__ = ["INTERRUPTED", "PROBLEM", "USERS_MISTAKE", "UsersMistake", "WrongResult"]

PROBLEM = 1
USERS_MISTAKE = 2
INTERRUPTED = 130
"""What shells say of a process that SIGINT ended."""


class UsersMistake(Exception):
    """Something about the arguments, or about what they name; the message ends in a hint."""

    def __init__(self, message: str, *, hint: str) -> None:
        super().__init__(f"{message}\nhint: {hint}")


class WrongResult(Exception):
    """A value that came back is not what a plain computation gives: a bug in crossfade."""

    def __init__(self, what: str, found: object, expected: object) -> None:
        super().__init__(
            f"{what} is {_short(found)}, and should be {_short(expected)}\nhint: this is a bug in crossfade; please report it"
        )


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
