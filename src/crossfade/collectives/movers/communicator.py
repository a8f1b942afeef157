"""The tensors of a collective, moved by a user-defined communicator (`crossfade.graph.communicators`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from crossfade.collectives.protocol import Caller
from crossfade.collectives.rendezvous import Rendezvous
from crossfade.collectives.table import Part
from crossfade.collectives.terms import Terms
from crossfade.edges.by_communicator import call
from crossfade.types import CollectiveKind


class CommunicatorMover:
    """Blocks in the user's code. The communicator is initialized already, and stays the caller's.

    An error that it raises ends the graph, since it is not known how far the others are.
    """

    caller = Caller.PROGRAM
    signal_bytes = 0

    def __init__(self, communicator: Any) -> None:
        self._communicator = communicator

    def describe(self) -> str:
        return ""

    def connect(self, rendezvous: Rendezvous, parts: Sequence[Part], published: Sequence[tuple[int, str]]) -> None: ...

    def move(self, terms: Terms, rank: int, tensors: Sequence[torch.Tensor], outs: Sequence[torch.Tensor]) -> None:
        op = () if terms.kind is CollectiveKind.ALLGATHER else (terms.op,)
        for tensor, out in zip(tensors, outs, strict=True):
            if out.numel():
                call(self._communicator, str(terms.kind), "", tensor, out, *op)

    def abort(self, reason: str) -> None: ...

    def close(self) -> None: ...
