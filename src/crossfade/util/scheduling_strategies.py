"""Ray's import path of scheduling strategies, which actors accept and which decide nothing on one host."""

from __future__ import annotations

from typing import TYPE_CHECKING

from crossfade.api.strategies import (
    DoesNotExist,
    Exists,
    In,
    NodeAffinitySchedulingStrategy,
    NodeLabelSchedulingStrategy,
    NotIn,
    PlacementGroupSchedulingStrategy,
)
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

if not TYPE_CHECKING:
    __getattr__ = refuse_others(__name__)
