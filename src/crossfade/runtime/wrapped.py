"""Steps with something around them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

from crossfade.runtime.cursor import Step

__all__ = ["behind", "inside", "unless"]


def behind(before: Sequence[Callable[[], None]], step: Step) -> Step:
    """A step before which something is to be done."""
    if not before:
        return step

    def after_them() -> bool:
        for each in before:
            each()
        return step()

    return after_them


def unless(is_skipped: Callable[[], bool], step: Step, recorded: Step) -> Step:
    """A step that is recorded unless it passes a method by, which is no time in which an actor computes."""
    return lambda: step() if is_skipped() else recorded()


def inside(around: Callable[[], AbstractContextManager[None]], step: Step) -> Step:
    """A step that is done inside of something."""

    def within() -> bool:
        with around():
            return step()

    return within
