"""Ray's import path of several values as the output of a graph."""

from __future__ import annotations

from crossfade.dag import MultiOutputNode
from crossfade.not_here import refuse_others

__all__ = ["MultiOutputNode"]

refuse_others(__name__)
