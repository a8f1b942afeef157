"""What can be measured, one idea a file. Each measure is a generator that every rank of its step runs (see ``context.py``)."""

from __future__ import annotations

from collections.abc import Mapping

from crossfade.profile.context import Measure
from crossfade.profile.measures.beside import beside
from crossfade.profile.measures.launch import launch
from crossfade.profile.measures.set_up import close, join
from crossfade.profile.measures.signals import signals
from crossfade.profile.measures.transfers import transfers

__all__ = ["MEASURES"]

MEASURES: Mapping[str, Measure] = {
    "launch": launch,
    "signals": signals,
    "transfers": transfers,
    "beside": beside,
    "join": join,
    "close": close,
}
"""By the name that steps have for them."""
