"""Ray's import path of the input of a graph and its parts."""

from __future__ import annotations

from crossfade.dag import InputAttributeNode, InputNode
from crossfade.not_here import refuse_others

__all__ = ["InputAttributeNode", "InputNode"]

refuse_others(__name__)
