"""Ray's import path of the communicator that stands for the transport ``gloo``."""

from __future__ import annotations

from crossfade.graph.communicators import CPUCommunicator
from crossfade.not_here import refuse_others

__all__ = ["CPUCommunicator"]

refuse_others(__name__)
