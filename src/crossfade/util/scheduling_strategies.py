"""Options for where Ray would place an actor: accepted, and without effect, since all actors are on one host.

The import path is Ray's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from crossfade.not_here import refuse_others

__all__ = [
    "DoesNotExist",
    "Exists",
    "In",
    "NodeAffinitySchedulingStrategy",
    "NodeLabelSchedulingStrategy",
    "NotIn",
    "PlacementGroupSchedulingStrategy",
]


@dataclass
class PlacementGroupSchedulingStrategy:
    """Places an actor in a placement group."""

    placement_group: Any
    placement_group_bundle_index: int = -1
    placement_group_capture_child_tasks: bool | None = None


@dataclass
class NodeAffinitySchedulingStrategy:
    """Places an actor on one node."""

    node_id: str
    soft: bool
    _spill_on_unavailable: bool = False
    _fail_on_unavailable: bool = False


class In:
    """Matches a label that has one of these values."""

    def __init__(self, *values: str) -> None:
        self.values = list(values)


class NotIn(In):
    """Matches a label that has none of these values."""


class Exists:
    """Matches a label that exists."""


class DoesNotExist:
    """Matches a label that does not exist."""


class NodeLabelSchedulingStrategy:
    """Places an actor on a node with certain labels."""

    def __init__(self, hard: Mapping[str, Any] | None, *, soft: Mapping[str, Any] | None = None) -> None:
        self.hard = dict(hard or {})
        self.soft = dict(soft or {})


refuse_others(__name__)
