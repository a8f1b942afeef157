"""A shared-memory writer that looks whether all parties live before it gives a value away (crossfade.runtime.alive says why)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from crossfade.channels.shm_ring import ShmWriter
from crossfade.errors import CrossfadeError

__all__ = ["CheckedWriter"]


class CheckedWriter(ShmWriter):
    """A `ShmWriter` whose values may come from tensors that others put into this process's devices.

    ``distrust`` says why values cannot be trusted, if so; it must not wait.
    """

    def __init__(self, *args: Any, distrust: Callable[[], CrossfadeError | None], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._distrust = distrust

    def try_write(self, value: object) -> bool:
        """Raises a `ChannelBroken` if a party is dead whose tensors may be in the value, so that it may be made of rubbish."""
        if (error := self._distrust()) is not None:
            self.break_off(str(error))
        return super().try_write(value)
