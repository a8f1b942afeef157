"""What errors say about what a user gave: a name that is not known, a flag that is none, a value that cannot be used."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from contextlib import suppress

__all__ = ["add_note", "check_flag", "nearest"]


def nearest(asked: str, names: Iterable[str], otherwise: str = "") -> str:
    """A hint for a name that may be misspelt: ``did you mean 'shm'? the transports are copy, shm``.

    Letters may be small or capital. ``otherwise`` follows the nearest name, and stands alone where none is near.
    """
    names = list(names)
    close = difflib.get_close_matches(asked, names, n=1)
    if not close:
        in_small_letters = {name.lower(): name for name in names}
        close = [in_small_letters[each] for each in difflib.get_close_matches(asked.lower(), in_small_letters, n=1)]
    return f"did you mean {close[0]!r}? {otherwise}".rstrip() if close else otherwise


def add_note(error: BaseException, text: str) -> None:
    """Says more beside a user's error. One that takes no note (of a frozen class, say) goes without, and is not replaced."""
    with suppress(Exception):
        error.add_note(text)


def check_flag(name: str, value: object, hint: str = "") -> bool:
    """Refuses what is no bool of Python or numpy, so that no other argument is taken for yes. ``hint`` says what to write."""
    is_numpys = type(value).__module__ == "numpy" and type(value).__name__ in ("bool", "bool_")
    if not (isinstance(value, bool) or is_numpys):
        raise TypeError(f"{name} is {value!r}\nhint: {hint or 'it is True or False'}")
    return bool(value)
