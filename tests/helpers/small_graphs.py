"""Small graphs of actors that no session has, the plans that come of them, and what to look up in their timelines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st

from crossfade.graph.check import check
from crossfade.graph.collectives import bind_collective
from crossfade.graph.nodes import ActorInfo, InputNode, MultiOutputNode, Node, bind
from crossfade.plan.plan import Plan
from crossfade.plan.timeline import Span, Timeline
from crossfade.schedule.compile import compile_plan
from crossfade.schedule.cost import CostModel
from crossfade.types import CollectiveKind, Transport

METHODS = {**dict.fromkeys(("f", "g", "make", "take", "grad", "work", "step"), 1), "split": 2, "two": 2}

ROUND = CostModel(
    write_us=1.0,
    write_large_us=0.0,
    write_us_per_mb=0.0,
    read_us=0.5,
    read_large_us=0.0,
    hop_us=0.25,
    spin_us=1e9,
    host_us=1.0,
    receive_host_us=1.0,
    step_us=0.0,
    num_cores=64,
    balance_us=0.0,
)
"""Round figures; nobody sleeps, and there is a core for everyone."""


def actor(name: str, *gpus: int, session: str = "s") -> ActorInfo:
    return ActorInfo(name, name, session, METHODS, gpus=gpus)


def call(where: ActorInfo, method: str, *args: Any, **kwargs: Any) -> Any:
    return bind(where, method, args, kwargs)


def compiled(output: Node | MultiOutputNode, max_inflight: int = 4, **options: Any) -> Plan:
    """With overlap, if nothing else is said; all transports are there."""
    checked = check(output, session="s", transports=tuple(Transport))
    return compile_plan(checked, **{"max_inflight": max_inflight, "overlap": True, **options})[0]


@st.composite
def gpu_graphs(draw: st.DrawFn) -> MultiOutputNode:
    """A random graph over actors of which some have GPUs, with wishes that can be met."""
    actors = [actor(f"A{i}", *([i] if draw(st.booleans()) else [])) for i in range(draw(st.integers(1, 3)))]
    all_have = all(each.gpus for each in actors)
    none_has = not any(each.gpus for each in actors)
    wishes = [
        "auto",
        "gloo",
        *(["copy"] if all_have or none_has else []),
        *(["staged", Transport.NCCL] if all_have else []),
    ]
    inp = InputNode()
    values: list[Node] = [inp]
    used: set[Node] = set()
    for index in range(draw(st.integers(1, 5))):
        taken = draw(st.lists(st.sampled_from(values), max_size=3, unique=True)) if index else values
        used.update(taken)
        made = call(draw(st.sampled_from(actors)), draw(st.sampled_from(("make", "split"))), *taken)
        nodes = list(made) if isinstance(made, tuple) else [made]
        values += [node.with_tensor_transport(draw(st.sampled_from(wishes))) for node in nodes]
    for each in [
        each for each in actors if each.gpus and any(getattr(made, "actor", None) is each for made in inp._users)
    ]:
        inp.with_tensor_transport(device=draw(st.sampled_from(("default", "cpu", "cuda"))), reader=each)
    return MultiOutputNode([value for value in values[1:] if value not in used])


def draw_collectives(
    draw: st.DrawFn,
    actors: Sequence[ActorInfo],
    most: int,
    *,
    least_parties: int = 1,
    transports: Sequence[Transport | None] = (None,),
    edges: Sequence[str] = ("auto",),
) -> list[Node]:
    """Random calls and collectives, as many as ``most``; the values that nothing uses."""
    inp = InputNode()
    values: dict[str, list[Any]] = {each.id: [call(each, "make", inp)] for each in actors}
    users: set[Node] = set()
    for _ in range(draw(st.integers(1, most))):
        if draw(st.booleans()):
            parties = draw(st.permutations(actors))[: draw(st.integers(least_parties, len(actors)))]
            members = [draw(st.sampled_from(values[each.id])) for each in parties]
            transport = draw(st.sampled_from(transports))
            made = bind_collective(draw(st.sampled_from(CollectiveKind)), members, transport=transport)
        else:
            where = draw(st.sampled_from(actors))
            members = draw(st.lists(st.sampled_from([v for each in values.values() for v in each]), max_size=2))
            made = [call(where, "take", *members)]
        users.update(members)
        for node in made:
            values[node.actor.id].append(node.with_tensor_transport(draw(st.sampled_from(edges))))
    return [value for each in values.values() for value in each if value not in users]


def only(timeline: Timeline, actor: str, what: str, kind: str = "", execution: int = 0) -> Span:
    """The one span that fits: on the stream of this name, or with this label."""
    found = [
        span
        for span in timeline.spans
        if (span.actor, span.execution) == (actor, execution)
        and what in (span.stream, span.label)
        and kind in ("", span.kind)
    ]
    assert len(found) == 1, found
    return found[0]


def times(span: Span) -> tuple[float, float]:
    """Start and end, without the last digits' noise."""
    return round(span.start_us, 6), round(span.end_us, 6)
