"""Ray's import paths of what collectives and type hints are given."""

from __future__ import annotations

from crossfade.not_here import refuse_others

__all__: list[str] = []

refuse_others(__name__)
