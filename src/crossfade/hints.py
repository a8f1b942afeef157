"""What errors say about what a user gave: a name that is not known, a flag that is none."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = ["check_flag", "nearest"]


def nearest(asked: str, names: Iterable[str], otherwise: str = "") -> str:
    """A hint for a name that may be misspelt: ``did you mean 'shm'? the transports are copy, shm``.

    Args:
        asked: the name that is not known.
        names: those that are.
        otherwise: what to say behind the nearest name, and alone where none is near.
    """
    close = difflib.get_close_matches(asked, list(names), n=1)
    return f"did you mean {close[0]!r}? {otherwise}".rstrip() if close else otherwise


def check_flag(name: str, value: object, hint: str = "") -> None:
    """Refuses what is neither True nor False, so that no other argument is taken for yes.

    Args:
        name: of the argument.
        value: what the user passed.
        hint: what to say instead of what a flag may be.

    Raises:
        TypeError: it is no bool.
    """
    if not isinstance(value, bool):
        raise TypeError(f"{name} is {value!r}\nhint: {hint or 'it is True or False'}")
