"""Ray's import path of reductions and devices: ``from crossfade.experimental.util.types import ReduceOp``."""

from crossfade.types import ReduceOp
from crossfade.types import TargetDevice as Device

__all__ = ["Device", "ReduceOp"]
