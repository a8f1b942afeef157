"""Which step of a plan waits for which: what PL-2 is about.

Each party runs its actions once per round, in rounds -A, ..., -1, 0, 1, ...: A is the largest ``ahead``. In round t an
action handles execution t + ahead, and does nothing where that is negative.

The driver does not take its outputs one after another: it takes each as soon as it has arrived, after the round's inputs are
written (`output_reads`), and it writes the next round's inputs when all outputs are taken.

An actor whose method fails takes some of that method's inputs later (`crossfade.runtime.intake`). This only removes waits: nothing
waits for the delayed step but the writer's credit and the next value of the same channel, which wait for it anyway.

Each action is an event of each round. That event b waits for event a is an edge with a *lag*: b of round t waits for a
of round t - lag. Program order has lag 0, and 1 from the end of a round to the start of the next. Messages have lag 0,
credit has the ring's depth (over ``copy``, where a value with device tensors takes a slot of the device too, no more than
these), and a receive that runs k ahead comes k rounds before its execution's: edges out of it gain k, edges into it lose k.

What moves in the background has events of its own, one per execution. The *arrival* of a value over an ordered transport
waits for its send, its receive, and the arrival before it at the same party: a party has one receiving thread (decision
0004). A user-defined communicator moves nothing in the background: the arrival waits for the two ends alone. The *meeting* of
a collective waits until all its parties have started it; it ends at none of them before.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from crossfade.plan.actions import MAIN, Verb
from crossfade.plan.plan import ChannelSpec, CollectiveSpec, Plan
from crossfade.plan.text import values_used
from crossfade.plan.waits import Step, Waits
from crossfade.types import DRIVER

_HAVE_ENDS = frozenset({Verb.SEND, Verb.RECV, Verb.COLL})
"""On ``main``, these have two events."""


@dataclass(slots=True)
class Book:
    """Where things happen, as far as the checks have come."""

    runs: dict[str, Step] = field(default_factory=dict)  # the step that runs a node, by node
    puts: dict[str, Step] = field(default_factory=dict)  # the step that writes or sends, by channel
    # the step that reads or receives, by channel and reader.
    takes: dict[tuple[str, str], Step] = field(default_factory=dict)
    frees: dict[tuple[str, str], Step] = field(default_factory=dict)  # the step that frees, by value and party
    # the step that does a collective, by collective and party.
    colls: dict[tuple[str, str], Step] = field(default_factory=dict)
    # the first step that uses a value which came through a channel or from a collective, by value and party.
    first_uses: dict[tuple[str, str], Step] = field(default_factory=dict)


def meeting_use(plan: Plan, book: Book, collective: str, actor: str) -> Step | None:
    """The party's first step that uses what it gets from a collective."""
    uses = (book.first_uses.get((value, actor)) for value in plan.collective[collective].outputs_of(actor))
    return min((use for use in uses if use is not None), default=None)


def waits_of(plan: Plan, book: Book) -> Waits:
    """The waits of a plan with which nothing else is wrong."""
    waits = Waits()
    starts: dict[Step, int] = {}
    ends: dict[Step, int] = {}
    for actor, actions in plan.programs.items():
        events: list[tuple[int, int]] = []  # the start and the end of each step
        for index, action in enumerate(actions):
            step = (actor, index)
            start = end = waits.event(step, action.ahead)
            if action.stream == MAIN and action.verb in _HAVE_ENDS:
                end = waits.event(step, action.ahead)
                waits.edges.append((start, end, 0))
            starts[step], ends[step] = start, end
            events.append((start, end))
        _add_program(waits, output_reads(plan) if actor == DRIVER else [], events)
    for collective in plan.collectives:
        _add_meeting(waits, plan, book, collective, starts, ends)
    arrivals: dict[Step, int] = {}
    for channel in plan.channels:
        for reader in channel.readers:
            _add_channel(waits, book, channel, reader, starts, ends, arrivals)
    _add_receiving_threads(waits, plan, arrivals)
    return waits


def output_reads(plan: Plan) -> list[list[int]]:
    """For each output that the driver reads and does not use for anything else: the positions of its ``read`` and ``free``."""
    actions = plan.programs.get(DRIVER, ())
    uses = {value for action in actions if action.verb is not Verb.FREE for value in values_used(plan, action, DRIVER)}
    places: dict[str, list[int]] = {}
    for index, action in enumerate(actions):
        if action.verb is Verb.READ and plan.channel[action.target].value not in uses:
            places[plan.channel[action.target].value] = [index]
        elif action.verb is Verb.FREE and action.target in places:
            places[action.target].append(index)
    return list(places.values())


def _add_program(waits: Waits, output_places: Sequence[Sequence[int]], events: Sequence[tuple[int, int]]) -> None:
    """Adds the waits between the steps of one party, one step after another, round after round."""
    beside = {index for places in output_places for index in places}
    program = [event for index, event in enumerate(events) if index not in beside]
    reads = [[events[index] for index in places] for places in output_places]
    for strand in filter(None, (program, *reads)):
        waits.edges += [(end, start, 0) for (_, end), (start, _) in pairwise(strand)]
        waits.edges.append((strand[-1][1], strand[0][0], 1))
    for read in reads if program else ():
        waits.edges.append((program[-1][1], read[0][0], 0))
        waits.edges.append((read[-1][1], program[0][0], 1))


def _add_channel(
    waits: Waits,
    book: Book,
    channel: ChannelSpec,
    reader: str,
    starts: Mapping[Step, int],
    ends: Mapping[Step, int],
    arrivals: dict[Step, int],
) -> None:
    """What the two ends of a channel wait for, and the arrival of what comes by itself."""
    put, take = book.puts[channel.id], book.takes[channel.id, reader]
    freed = ends[book.frees[channel.value, reader]]
    if not channel.is_ordered:
        waits.add(ends[put], starts[take])
        waits.add(freed, starts[put], channel.credit)
        return
    arrival = arrivals[take] = waits.event(take, 0)
    waits.add(freed, starts[take], channel.depth)
    waits.add(starts[put], arrival)
    waits.add(starts[take], arrival)
    receive_waits, send_waits = starts[take] != ends[take], starts[put] != ends[put]
    waits.add(arrival, ends[take] if receive_waits else starts[book.first_uses[channel.value, reader]])
    if send_waits:
        waits.add(arrival, ends[put])
    else:
        waits.add(arrival, starts[put], channel.depth)


def _add_receiving_threads(waits: Waits, plan: Plan, arrivals: Mapping[Step, int]) -> None:
    """Values arrive at a party one after another, in the order in which their receives start, round after round.

    In one round the receive that runs k ahead is that of execution t + k: from one arrival to the next, the execution
    grows by the difference of their ``ahead``.
    """
    receives: dict[str, list[int]] = defaultdict(list)
    for actor, index in sorted(arrivals):
        receives[actor].append(index)
    for actor, actions in plan.programs.items():
        mine = [
            (arrivals[actor, index], actions[index].ahead)
            for index in receives[actor]
            if not plan.channel[actions[index].target].transport.blocks
        ]
        for (before, before_ahead), (after, after_ahead) in pairwise(mine):
            waits.edges.append((before, after, after_ahead - before_ahead))
        if mine:
            waits.edges.append((mine[-1][0], mine[0][0], 1 + mine[0][1] - mine[-1][1]))


def _add_meeting(
    waits: Waits,
    plan: Plan,
    book: Book,
    collective: CollectiveSpec,
    starts: Mapping[Step, int],
    ends: Mapping[Step, int],
) -> None:
    """The parties of a collective meet when all have started it; on ``main`` each ends it then, else its first user waits."""
    steps = [book.colls[collective.id, party] for party in collective.parties]
    meeting = waits.event(steps[0], 0)
    for party, step in zip(collective.parties, steps, strict=True):
        waits.add(starts[step], meeting)
        first_use = meeting_use(plan, book, collective.id, party)
        if starts[step] != ends[step]:
            waits.add(meeting, ends[step])
        elif first_use is not None:
            waits.add(meeting, starts[first_use])
