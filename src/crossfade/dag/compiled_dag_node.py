"""Ray's import path of compiled graphs."""

from __future__ import annotations

from crossfade.dag import CompiledDAG
from crossfade.not_here import refuse_others

__all__ = ["CompiledDAG"]

refuse_others(__name__)
