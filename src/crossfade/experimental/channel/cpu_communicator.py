"""Ray's import path of the communicator that stands for the transport ``gloo``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from crossfade.graph.communicators import CPUCommunicator
from crossfade.not_here import refuse_others

__all__ = ["CPUCommunicator"]

if not TYPE_CHECKING:
    __getattr__ = refuse_others(__name__)
