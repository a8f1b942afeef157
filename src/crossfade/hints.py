"""What an error says about a name that is not known."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = ["nearest"]


def nearest(asked: str, names: Iterable[str], otherwise: str = "") -> str:
    """A hint for a name that may be misspelt: ``did you mean 'shm'? the transports are copy, shm``.

    Args:
        asked: the name that is not known.
        names: those that are.
        otherwise: what to say behind the nearest name, and alone where none is near.
    """
    close = difflib.get_close_matches(asked, list(names), n=1)
    return f"did you mean {close[0]!r}? {otherwise}".rstrip() if close else otherwise
