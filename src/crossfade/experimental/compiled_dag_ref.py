"""Ray's import path of the references that ``execute`` gives."""

from __future__ import annotations

from typing import TYPE_CHECKING

from crossfade.api import CompiledRef
from crossfade.not_here import refuse_others

__all__ = ["CompiledDAGRef"]

CompiledDAGRef = CompiledRef

if not TYPE_CHECKING:
    __getattr__ = refuse_others(__name__)
