"""Ray's import path of the references that ``execute`` gives."""

from __future__ import annotations

from crossfade.api import CompiledRef
from crossfade.not_here import refuse_others

__all__ = ["CompiledDAGRef"]

CompiledDAGRef = CompiledRef

refuse_others(__name__)
