"""An error in a value's place, short enough for the record in which the value would have been told of."""

from __future__ import annotations

import pickle

from crossfade.channels.ring_layout import INLINE_BYTES
from crossfade.errors import CrossfadeError, Failure

__all__ = ["short_failure"]

_MOST_CHARACTERS = 240


def short_failure(error: CrossfadeError, actor: str, node: str) -> bytes:
    """The pickle of an error of its kind that fits into a record, for the reader that waits for the value."""
    num = _MOST_CHARACTERS
    while True:
        failure = Failure.capture(type(error)(str(error)[:num]), actor=actor, node=node[:num])
        data = pickle.dumps(failure, 5)
        if len(data) <= INLINE_BYTES:
            return data
        num //= 2
