"""The passes, in order."""

from __future__ import annotations

from collections.abc import Mapping

from crossfade.graph.check import CheckedGraph
from crossfade.plan.actions import Verb
from crossfade.plan.call import Call
from crossfade.plan.plan import Plan
from crossfade.plan.validate import find_fault, validate
from crossfade.schedule.channels import add_channels, add_start_signal
from crossfade.schedule.collectives import start_collectives
from crossfade.schedule.draft import Draft
from crossfade.schedule.lower import lower
from crossfade.schedule.messages import add_frees, add_messages, hoist_receives, trail_sends
from crossfade.schedule.transports import Gpus
from crossfade.topology import Topology


def compile_plan(
    graph: CheckedGraph,
    *,
    max_inflight: int,
    buffer_bytes: int = 0,
    overlap: bool = False,
    topology: Topology | None = None,
    uuids: Mapping[int, str] | None = None,
    hosts: Mapping[str, str] | None = None,
    is_described: bool = False,
) -> tuple[Plan, dict[str, Call]]:
    """A validated plan, and the arguments of its nodes by node id. Raises a `GraphError` if a node asks for a transport that it
    cannot have. ``hosts`` has the host of each party, where there are several; for ``is_described`` see `Gpus`.
    """
    gpus = Gpus(graph.devices, topology, uuids or {}, hosts or {}, is_described)
    draft = lower(graph, gpus, max_inflight=max_inflight)
    draft = add_channels(draft, gpus, buffer_bytes=buffer_bytes)
    draft = add_messages(draft)
    if overlap:
        draft = start_collectives(draft)
    draft = add_start_signal(draft)
    draft = add_frees(draft)
    if overlap:
        draft = trail_sends(hoist_receives(draft))
    elif _blocks(draft):
        draft = trail_sends(draft)
    plan = draft.plan()
    validate(plan)
    return plan, draft.calls


def _blocks(draft: Draft) -> bool:
    """Whether waiting for each send to be taken could wait for itself; such plans let their sends trail."""
    has_sends = any(action.verb is Verb.SEND for actions in draft.programs.values() for action in actions)
    return has_sends and find_fault(draft.plan()) is not None
