"""Collectives between the actors of a graph, on CPU and GPU tensors: ``allreduce.bind([a.grad.bind(x), b.grad.bind(x)])``.

Each ``bind`` takes one node of each of one or more actors and returns one node for each of them, to be used like any other node.
"""

from __future__ import annotations

from crossfade.api.collectives import AllGather, AllReduce, Broadcast, ReduceScatter
from crossfade.not_here import refuse_others
from crossfade.types import ReduceOp

__all__ = ["ReduceOp", "allgather", "allreduce", "broadcast", "reducescatter"]

allgather = AllGather()
allreduce = AllReduce()
broadcast = Broadcast()
reducescatter = ReduceScatter()

refuse_others(__name__)
