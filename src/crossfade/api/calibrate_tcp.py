"""What moving values between hosts costs: a measure in a session whose actors are on several."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from crossfade.api.calibrate import RING_BYTES, Probe, moves_of, run_sizes
from crossfade.api.compiled import compile_graph
from crossfade.api.remote import kill, remote
from crossfade.errors import SessionError
from crossfade.graph.nodes import InputNode
from crossfade.schedule.cost import BYTES_PER_MB, CostModel
from crossfade.schedule.fit import fit_line
from crossfade.types import DRIVER


def calibrate_tcp(costs: CostModel, **options: Any) -> CostModel:
    """Measures what moving values by TCP costs between this host and another one, in the running session.

    Args:
        costs: what `calibrate` has measured on this host.
        **options: those of an actor, which place it on the other host, such as ``scheduling_strategy``.

    Raises:
        SessionError: the actor is on this host.
    """
    probe = remote(Probe).options(**options).remote()
    try:
        with InputNode() as inp:
            node = probe.give.bind(inp)
        with compile_graph(node, max_inflight=1, record=True) as graph:
            if not graph.plan.hosts:
                raise SessionError("the actor is on this host", hint="place it on another one: scheduling_strategy=...")
            sizes, timeline = run_sizes(graph, (1, *RING_BYTES), lambda size, array: array.nbytes == size)
    finally:
        kill(probe)
    written, read = moves_of(timeline, node.actor.id, "write n0"), moves_of(timeline, DRIVER, "read n0")
    # From the beginning of the one to the end of the other: much of a value is received while the reader still looks for it.
    points = [
        (size, max(1.0, read[number][-1].end_us - written[number][0].start_us - _ring_us(costs, size)) / 2)
        for number, size in sizes.items()
    ]
    tcp_us, tcp_us_per_byte = fit_line(points)
    return replace(costs, tcp_us=tcp_us, tcp_us_per_mb=tcp_us_per_byte * BYTES_PER_MB)


def _ring_us(costs: CostModel, size_bytes: int) -> float:
    return costs.write_time_us(size_bytes) + costs.hop_us + costs.read_time_us(size_bytes)
