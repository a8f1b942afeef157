"""Where Ray would place an actor: options that are accepted, and decide nothing where all actors are on one host.

The import path is Ray's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

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
    """In a placement group."""

    placement_group: Any
    placement_group_bundle_index: int = -1
    placement_group_capture_child_tasks: bool | None = None


@dataclass
class NodeAffinitySchedulingStrategy:
    """On one node."""

    node_id: str
    soft: bool
    _spill_on_unavailable: bool = False
    _fail_on_unavailable: bool = False


class In:
    """A label that has one of these values."""

    def __init__(self, *values: str) -> None:
        self.values = list(values)


class NotIn(In):
    """A label that has none of these values."""


class Exists:
    """A label that is there."""


class DoesNotExist:
    """A label that is not there."""


class NodeLabelSchedulingStrategy:
    """On a node with labels."""

    def __init__(self, hard: Mapping[str, Any] | None, *, soft: Mapping[str, Any] | None = None) -> None:
        self.hard = dict(hard or {})
        self.soft = dict(soft or {})


if not TYPE_CHECKING:
    __getattr__ = refuse_others(__name__)
