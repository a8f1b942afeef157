"""Ray's import path of the input of a graph and its parts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from crossfade.dag import InputAttributeNode, InputNode
from crossfade.not_here import refuse_others

__all__ = ["InputAttributeNode", "InputNode"]

if not TYPE_CHECKING:
    __getattr__ = refuse_others(__name__)
