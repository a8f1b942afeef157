"""Who waits for whom, right now: for a program that seems to stand still.

Nothing here takes a lock that the rest of the program uses, so it may run in a signal handler in the middle of anything.
"""

from __future__ import annotations

import os
import sys
import textwrap
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import TextIO

from crossfade.api.executions import Executions
from crossfade.api.session import Session, current
from crossfade.engines.state import ActorState, RingState, State
from crossfade.interrupted import uninterrupted
from crossfade.plan.plan import Plan
from crossfade.types import DRIVER

_LOOK_S = 1.0
_making = threading.Lock()


@uninterrupted
def dump(file: TextIO | None = None, *, stacks: bool = True) -> str:
    """Prints what every actor is doing, who waits for whom in every graph, what lies in the rings, and all stacks.

    A program that stands still can be asked from outside: ``kill -USR1 <pid of the driver>`` does the same, if the session was
    started in the main thread and the program has no handler of its own for that signal. (An actor prints its stacks then.)
    Takes up to a second for each actor that does not answer.

    Args:
        file: where to; ``sys.stderr`` by default.
        stacks: also print the stack of each thread.

    Returns:
        The text.
    """
    if file is not None and not hasattr(file, "write"):
        raise TypeError(
            f"dump writes to an open file, not to {file!r}\nhint: with open(path, 'w') as file: crossfade.dump(file)"
        )
    if not _making.acquire(blocking=False):
        return "crossfade: a dump is being made already\n"  # a signal came in the middle of one
    try:
        session = current()
        text = (
            "crossfade: no session in this process\n" if session is None else "\n".join(_lines(session, stacks)) + "\n"
        )
    finally:
        _making.release()
    try:
        print(text, end="", file=file or sys.stderr, flush=True)
    except RuntimeError:  # a signal came in the middle of a write to that very file
        os.write(2, text.encode(errors="replace"))
    return text


def _lines(session: Session, stacks: bool) -> Iterator[str]:
    state = session.engine.look(_LOOK_S)
    open_graphs = [keeper.executions for keeper in session.keepers]
    graphs = sorted(
        (each for each in open_graphs if isinstance(each, Executions) and _matters(each, state)),
        key=lambda graph: graph.opened.number,
    )
    yield f"crossfade: {_count(state.actors, 'actor')}, {_count(graphs, 'graph')}, driver pid {os.getpid()}"
    for actor in state.actors:
        yield f"  {actor.actor} (pid {actor.pid}) {actor.doing}"
    for graph in graphs:
        yield from _graph_lines(graph, state)
    if stacks:
        yield from _stack_lines(state)


def _matters(graph: Executions, state: State) -> bool:
    """Whether a graph is open, or an actor has still to leave it."""
    number = graph.opened.number
    return not graph.ended or any(part.plan == number for actor in state.actors for part in actor.parts)


def _count(things: Sequence[object], name: str) -> str:
    return f"{len(things)} {name}{'' if len(things) == 1 else 's'}"


def _graph_lines(graph: Executions, state: State) -> Iterator[str]:
    number = graph.opened.number
    inflight = [execution.number for execution in list(graph.inflight)]
    span = f": execution {inflight[0]}" + (f" to {inflight[-1]}" if len(inflight) > 1 else "") if inflight else ""
    yield f"graph {number}, {graph.ended or 'open'}, {len(inflight)} in flight{span}"
    rings = state.rings.get(number, ())
    if inflight:
        channel = graph.opened.awaited()
        yield f"  {DRIVER}, round {inflight[0]}: {_why(graph.plan, DRIVER, f'read {channel}', rings)}"
    doing = {actor.actor: actor for actor in state.actors}
    for party in graph.plan.programs:
        if party != DRIVER and party in doing:
            yield f"  {party}{_where(graph.plan, doing[party], number, rings)}"
    for ring in rings:
        if ring.num_unread:
            yield f"  ring {ring.channel}, {ring.writer} -> {ring.reader}: {ring.num_unread} of {ring.depth} unread"


def _where(plan: Plan, actor: ActorState, number: int, rings: Sequence[RingState]) -> str:
    part = next((part for part in actor.parts if part.plan == number), None)
    if part is None:
        return f" {actor.doing}"
    doing = f"has left: {part.fault}" if part.fault else _why(plan, actor.actor, part.action, rings)
    return f", round {part.num_rounds}: {doing}"


def _why(plan: Plan, party: str, action: str, rings: Sequence[RingState]) -> str:
    """What an action does, or waits for, and whose turn it is then."""
    verb, _, rest = action.partition(" ")
    target = rest.partition(" ")[0]
    spec = plan.channel.get(target)
    match verb:
        case "run":
            node = plan.node[target]
            return f"runs {node.actor}.{node.method} (node {target})"
        case "read" | "recv" if spec is not None:
            unread = _unread(rings, target)
            if unread.get(party):
                return f"is about to take {target} from {spec.writer}"
            return f"waits for {spec.writer} to give {target}{_maker(plan, spec.value)}"
        case "write" | "send" if spec is not None:
            unread = _unread(rings, target)
            full = [reader for reader in spec.readers if unread.get(reader, 0) >= spec.depth] or list(spec.readers)
            return f"waits for {', '.join(full)} to take {target} (its ring of {spec.depth} is full)"
        case "coll":
            collective = plan.collective[target]
            others = [name for name in collective.parties if name != party]
            return f"is in {collective.kind} {target} with {', '.join(others)}"
    return f"is at {action}" if action else "is between two rounds"


def _unread(rings: Sequence[RingState], channel: str) -> Mapping[str, int]:
    return {ring.reader: ring.num_unread for ring in rings if ring.channel == channel}


def _maker(plan: Plan, value: str) -> str:
    node = plan.maker.get(value)
    return "" if node is None else f", which {node.actor}.{node.method} returns"


def _stack_lines(state: State) -> Iterator[str]:
    from crossfade.engines.sentinel import all_stacks

    yield f"stacks of {DRIVER}"
    yield textwrap.indent(all_stacks().rstrip(), "  ")
    for actor in state.actors:
        if actor.stacks:
            yield f"stacks of {actor.actor} (pid {actor.pid})"
            yield textwrap.indent(actor.stacks.rstrip(), "  ")
