"""What holds for one build of crossfade only: pure Python, or its hot modules compiled."""

from __future__ import annotations

import pytest

import crossfade

__all__ = ["BUILD", "interpreted_only"]

BUILD = "compiled" if crossfade.compiled else "pure Python"


def interpreted_only(reason: str) -> pytest.MarkDecorator:
    """Skips a test, or the tests of a file, of the compiled build: what they replace or look at is no Python object there."""
    return pytest.mark.skipif(crossfade.compiled, reason=f"{reason}: tested on the pure build, of the same source")
