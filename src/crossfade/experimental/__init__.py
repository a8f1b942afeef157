"""Import paths of Ray's, for programs that are ported: what is here has its home elsewhere in crossfade."""

from __future__ import annotations

from crossfade.not_here import refuse_others

__all__: list[str] = []

refuse_others(__name__)
