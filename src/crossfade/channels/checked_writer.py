"""A shared-memory writer that looks who is alive before it gives a value away (crossfade.runtime.alive says why)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from crossfade.channels.shm_ring import ShmWriter

__all__ = ["CheckedWriter"]


class CheckedWriter(ShmWriter):
    """A `ShmWriter` whose values may come from tensors that others put into this process's devices.

    Args:
        *args: see `ShmWriter`.
        who_died: names those among these others who are dead, without waiting.
        **kwargs: see `ShmWriter`.
    """

    def __init__(self, *args: Any, who_died: Callable[[], Sequence[str]], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._who_died = who_died

    def try_write(self, value: object) -> bool:
        """See the protocol.

        Raises:
            ChannelBroken: somebody whose tensors may be in the value is dead, so that it may be made of rubbish.
        """
        if dead := self._who_died():
            self.break_off(f"{', '.join(dead)} died, and the value may have been made of what came from there")
        return super().try_write(value)
