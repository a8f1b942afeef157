"""One execution of a graph: its outputs as they arrive, and the references that still want them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from crossfade.engines.protocol import EMPTY


class Execution:
    """One execution, under way or finished. References hold it, so its values live as long as a reference needs them."""

    __slots__ = ("num_values", "number", "owners", "values")

    def __init__(self, num_outputs: int) -> None:
        self.number = -1  # once it has been submitted: the position among the executions of the graph, counted from 0
        # one entry for each output, `EMPTY` until the output is taken in.
        self.values: list[Any] = [EMPTY] if num_outputs == 1 else [EMPTY] * num_outputs
        self.num_values = 0  # if the graph has several outputs: how many distinct values have been taken in
        # for each output whose reference was made: a function that returns the reference, or None once it is gone.
        self.owners: list[Callable[[], object]] = []

    def has(self, place: int) -> bool:
        """Whether an output has been taken in."""
        return self.values[place] is not EMPTY

    def is_wanted(self) -> bool:
        """Whether the user still has to get results: some live references miss their values, and none of them has been got."""
        refs = [owner() for owner in self.owners]
        refs += [True] * (len(self.values) - len(refs))  # their references are about to be made
        is_missing = any(ref is not None and value is EMPTY for ref, value in zip(refs, self.values, strict=True))
        return is_missing and not any(getattr(ref, "was_got", False) for ref in refs)

    def drop(self) -> None:
        """Forgets the references: no result of this execution will be got."""
        self.owners = [_gone] * len(self.values)


def _gone() -> None:
    """The owner function of an output whose reference was dropped: returns None."""
