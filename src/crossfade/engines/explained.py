"""Context managers that turn errors of the system and of imports into errors that say what failed and what to do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from crossfade.errors import CrossfadeError, MissingDependency
from crossfade.host.limits import limit_met

__all__ = ["explained", "torch_needed"]


@contextmanager
def explained(kind: type[CrossfadeError], what: str) -> Iterator[None]:
    """A context manager: an OSError about a limit of this process leaves it as an error of ``kind`` that says ``what`` failed."""
    try:
        yield
    except OSError as error:
        met = None if isinstance(error, CrossfadeError) else limit_met(error)
        if met is None:
            raise
        words, hint = met
        raise kind(f"{what}: {words}", hint=hint) from error


@contextmanager
def torch_needed(needed_for: str) -> Iterator[None]:
    """A context of imports of modules that import torch: where it is missing, a `MissingDependency` says what needs it."""
    try:
        yield
    except ImportError as error:
        raise MissingDependency("torch", extra="torch", needed_for=needed_for) from error
