"""One execution of a graph: its outputs, as they come, and who still wants them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from crossfade.engines.protocol import EMPTY
from crossfade.interrupted import brief

if TYPE_CHECKING:
    from crossfade.api.executions import Executions

__all__ = ["Execution", "Keeper"]


class Execution:
    """One execution under way or finished. References hold it, so its values live as long as they are wanted.

    Attributes:
        number: counted from 0.
        values: one for each output, `EMPTY` until it is taken in.
        num_values: of several outputs, which come one by one, how many different values have been taken in.
        owners: for each output whose reference has been made, who gives that, or None once it is gone.
    """

    __slots__ = ("num_values", "number", "owners", "values")

    def __init__(self, number: int, num_outputs: int) -> None:
        self.number = number
        self.values: list[Any] = [EMPTY] * num_outputs
        self.num_values = 0
        self.owners: list[Callable[[], object]] = []

    def has(self, place: int) -> bool:
        """Whether an output has been taken in."""
        return self.values[place] is not EMPTY

    def is_wanted(self) -> bool:
        """Whether the user has references to results, some of which have not been taken in, and has got none of them yet."""
        refs = [owner() for owner in self.owners]
        refs += [True] * (len(self.values) - len(refs))  # they are about to be made
        is_missing = any(ref is not None and value is EMPTY for ref, value in zip(refs, self.values, strict=True))
        return is_missing and not any(getattr(ref, "was_got", False) for ref in refs)

    def drop(self) -> None:
        """Nobody will get a result."""
        self.owners = [_gone] * len(self.values)


def _gone() -> None:
    """What stands for a reference that nobody has."""


class Keeper:
    """A graph, and references whose values are not there yet, have it: the plan stays open until nobody does.

    Args:
        executions: those of the plan.
    """

    __slots__ = ("_executions",)

    def __init__(self, executions: Executions) -> None:
        self._executions = executions

    @brief
    def __del__(self) -> None:
        # Called by the garbage collector in the middle of anything: it only takes note.
        executions = self._executions
        if not executions.ended:
            executions.end("the graph was dropped")
            executions.session.orphans.append(executions.opened)
