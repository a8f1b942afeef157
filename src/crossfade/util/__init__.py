"""Ray's import paths, for programs that are ported: the names here are defined elsewhere in crossfade."""

from __future__ import annotations

from crossfade.not_here import refuse_others

__all__: list[str] = []

refuse_others(__name__)
