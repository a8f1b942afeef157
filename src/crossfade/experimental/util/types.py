"""Ray's import path of reductions and devices: ``from crossfade.experimental.util.types import ReduceOp``."""

from __future__ import annotations

from crossfade.not_here import refuse_others
from crossfade.types import ReduceOp
from crossfade.types import TargetDevice as Device

__all__ = ["Device", "ReduceOp"]

refuse_others(__name__)
