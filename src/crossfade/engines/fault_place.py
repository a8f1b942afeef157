"""Where in a plan a party could not continue, and why, for people."""

from __future__ import annotations

from crossfade.plan.actions import Action
from crossfade.plan.plan import Plan

__all__ = ["fault_place", "fault_text"]


def fault_text(error: Exception, plan: Plan, action: Action | None) -> str:
    """What went wrong, and at which action; a hint stays behind both."""
    place = fault_place(plan, action)
    message, hint, more = str(error).partition("\nhint: ")
    return f"{message} (at {place}){hint}{more}" if place else str(error)


def fault_place(plan: Plan, action: Action | None) -> str:
    """``write n0, the value of a.make (node n0) on its way to b``; empty where it stood between two rounds."""
    if action is None:
        return ""
    spec = plan.channel.get(action.target)
    value = action.target if spec is None else spec.value
    node = plan.node.get(value) or plan.maker.get(value)
    made = "" if node is None else f", the value of {node.actor}.{node.method} (node {node.id})"
    way = "" if spec is None else f" on its way to {', '.join(spec.readers)}"
    return f"{action}{made}{way}"
