"""The tensors of a collective, moved by a user-defined communicator (`crossfade.graph.communicators`)."""

from __future__ import annotations

from typing import Any

import torch

from crossfade.collectives.terms import Meeting, Offer, result_shape
from crossfade.edges.by_communicator import call
from crossfade.types import CollectiveKind

__all__ = ["together"]


def together(communicator: Any, meeting: Meeting, offer: Offer) -> list[torch.Tensor]:
    """Runs this party's part of a collective for which all parties' tensors fit. Blocks until it is done.

    Raises:
        ChannelBroken: the communicator raised something.
    """
    results = []
    for tensor in offer.tensors:
        shape = result_shape(meeting, tensor.shape)
        result = torch.empty(shape, dtype=tensor.dtype, device=tensor.device)
        op = () if meeting.kind is CollectiveKind.ALLGATHER else (meeting.op,)
        if result.numel():
            call(communicator, str(meeting.kind), meeting.label, tensor.contiguous(), result, *op)
        results.append(result)
    return results
