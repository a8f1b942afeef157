"""Ray's import path of the settings that compiled graphs have by default."""

from __future__ import annotations

from crossfade.api.context import DAGContext
from crossfade.not_here import refuse_others

__all__ = ["DAGContext"]

refuse_others(__name__)
