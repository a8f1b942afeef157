"""A plan: what every actor does for one execution, as a value."""

from __future__ import annotations

from dataclasses import dataclass

from crossfade.plan.specs import BarePlan, ChannelSpec, CollectiveSpec, CommunicatorSpec, InputSpec, NodeSpec
from crossfade.plan.text import format_plan

__all__ = ["ChannelSpec", "CollectiveSpec", "CommunicatorSpec", "InputSpec", "NodeSpec", "Plan"]


@dataclass(frozen=True)
class Plan(BarePlan):
    """What every actor will do, round after round; ``str`` gives its text form."""

    def __str__(self) -> str:
        return format_plan(self)
