"""A value that was put aside in the driver, as the message that a channel would carry."""

from __future__ import annotations

from typing import Any

from crossfade.channels.values.codec import decode, message_of


class Stored:
    """A value as a message, which is serialised now, once."""

    def __init__(self, value: Any) -> None:
        self._message = message_of(value).to_bytes()

    def load(self) -> Any:
        """The value anew, as a reader of a channel gets it: arrays are read-only views on the message."""
        return decode(memoryview(self._message))
