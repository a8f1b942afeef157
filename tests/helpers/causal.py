"""Measured timelines in which nothing moves before it was made, and nothing is used before it came: four actors in a diamond."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch

import crossfade
from crossfade.plan.device_streams import stream_in, stream_out
from crossfade.plan.spans import WAIT, Span
from crossfade.types import Transport

_BETWEEN_GPUS = (Transport.COPY, Transport.STAGED, Transport.NCCL)
NUM_EXECUTIONS = 12
MAX_INFLIGHT = 3


class Worker:
    """Tensors of its device, CPU tensors where it has none."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self._device = "cuda" if torch.cuda.is_available() else "cpu"

    def make(self, number: int, size: int) -> Any:
        return torch.full((size,), number, dtype=torch.int32, device=self._device)

    def double(self, value: Any) -> Any:
        return value * 2

    def difference(self, one: Any, other: Any, more: Any) -> tuple[int, int]:
        """Of the first and last elements."""
        left = one - other + more
        return int(left[0].item()), int(left[-1].item())


def check_causal(actors: Sequence[Any], transport: Any, *, overlap: bool, size: int, clock_us: float) -> None:
    """``clock_us``: how far the clocks of two actors' devices may be apart."""
    top, *sides, last = actors
    with crossfade.InputNode() as number:
        made = top.make.bind(number, size).with_tensor_transport(transport)
        doubled = [side.double.bind(made).with_tensor_transport(transport) for side in sides]
        graph = last.difference.bind(*doubled, made).compile(record=True, overlap=overlap, max_inflight=MAX_INFLIGHT)
    refs: list[Any] = []
    for execution in range(NUM_EXECUTIONS):
        if len(refs) == MAX_INFLIGHT:
            wanted = execution - MAX_INFLIGHT
            assert crossfade.get(refs.pop(0), timeout=60) == (wanted, wanted)
        refs.append(graph.execute(execution))
    assert [crossfade.get(ref, timeout=60)[0] for ref in refs] == [
        *range(NUM_EXECUTIONS - MAX_INFLIGHT, NUM_EXECUTIONS)
    ]
    spans: dict[tuple[str, str, str, int], list[Span]] = defaultdict(list)
    for span in graph.timeline().spans:
        if span.kind != WAIT:
            spans[span.actor, span.stream, span.label, span.execution].append(span)
    channels = [channel for channel in graph.plan.channels if channel.transport in _BETWEEN_GPUS]
    assert {channel.writer for channel in channels} == {actor._info.id for actor in (top, *sides)}
    for channel in channels:
        maker = graph.plan.maker[channel.value]
        users = {node.actor: node for node in reversed(graph.plan.nodes) if channel.value in node.inputs}
        out, come = ("send", "recv") if channel.is_ordered else ("write", "read")
        for execution in range(NUM_EXECUTIONS):
            (made_by,) = spans[channel.writer, "compute", f"run {maker.id}", execution]
            moved = spans[channel.writer, str(stream_out(channel.transport)), f"{out} {channel.id}", execution]
            assert moved, (channel.id, execution)
            assert min(span.start_us for span in moved) >= made_by.end_us - clock_us, (channel.id, execution)
            for reader in channel.readers:
                came = spans[reader, str(stream_in(channel.transport)), f"{come} {channel.id}", execution]
                ends = [span.end_us for span in came or moved]
                (used_by,) = spans[reader, "compute", f"run {users[reader].id}", execution]
                earliest = max(ends) if came or len(channel.readers) == 1 else min(ends)
                assert used_by.start_us >= earliest - clock_us, (channel.id, reader, execution)
    graph.teardown()
