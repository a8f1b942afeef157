"""Errors that say what failed, where, and what to do: of the system, of imports, and of a party that cannot continue a plan."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from crossfade.errors import CrossfadeError, MissingDependency
from crossfade.host.limits import limit_met
from crossfade.plan.actions import Action
from crossfade.plan.plan import Plan


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


def fault_text(error: Exception, plan: Plan, action: Action | None) -> str:
    """What went wrong, and at which action; a hint stays behind both."""
    place = _fault_place(plan, action)
    message, hint, more = str(error).partition("\nhint: ")
    return f"{message} (at {place}){hint}{more}" if place else str(error)


def _fault_place(plan: Plan, action: Action | None) -> str:
    """``write n0, the value of a.make (node n0) on its way to b``; empty where it stood between two rounds."""
    if action is None:
        return ""
    spec = plan.channel.get(action.target)
    value = action.target if spec is None else spec.value
    node = plan.node.get(value) or plan.maker.get(value)
    made = "" if node is None else f", the value of {node.actor}.{node.method} (node {node.id})"
    way = "" if spec is None else f" on its way to {', '.join(spec.readers)}"
    return f"{action}{made}{way}"
