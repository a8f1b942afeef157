"""Ray's import path of compiled graphs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from crossfade.dag import CompiledDAG
from crossfade.not_here import refuse_others

__all__ = ["CompiledDAG"]

if not TYPE_CHECKING:
    __getattr__ = refuse_others(__name__)
