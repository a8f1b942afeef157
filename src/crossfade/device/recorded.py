"""How an end that enqueues copies tells their recorder. Where there is none, nothing is enqueued for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeAlias

Begin: TypeAlias = Callable[[int], Callable[[int], None]]  # `Around`, where the execution is settled


class Around(Protocol):
    """Called before copies are enqueued; what it gives is called behind them, with how many bytes they copy."""

    @property
    def execution(self) -> int:
        """The execution at which the party's program is. An end that enqueues copies later asks when the value comes."""

    def __call__(self, stream: int, execution: int | None = None) -> Callable[[int], None]:
        """Begins a span of copies on a stream. ``execution`` is None for the one at which the party's program is."""


class Recorded(Protocol):
    """An object that enqueues copies."""

    around: Around | None  # records them, if it is not None


class Site:
    """A channel's copies on one device, where they have no other object of their own. See `Recorded`."""

    __slots__ = ("around",)

    def __init__(self) -> None:
        self.around: Around | None = None
