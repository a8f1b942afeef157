"""Ray's import path of several values as the output of a graph."""

from __future__ import annotations

from typing import TYPE_CHECKING

from crossfade.dag import MultiOutputNode
from crossfade.not_here import refuse_others

__all__ = ["MultiOutputNode"]

if not TYPE_CHECKING:
    __getattr__ = refuse_others(__name__)
