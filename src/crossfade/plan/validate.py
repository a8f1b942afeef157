"""The validator: proves that a plan keeps PL-1 to PL-4 in every execution and every interleaving, or names a step that
does not.

PL-1, PL-3 and PL-4 are checked party by party and queue by queue. For PL-2 each action is an event of each round;
``crossfade.plan.events`` says which event waits for which, ``crossfade.plan.waits`` which cycles of that are deadlocks.

The driver counts as a party like the others, which gets execution t before it writes the inputs of t + 1. A driver that
runs ahead only waits less.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import chain, groupby, pairwise

from crossfade.errors import PlanError
from crossfade.plan.actions import MAIN, PUTS, TAKES, Action, Verb
from crossfade.plan.events import Book, waits_of
from crossfade.plan.plan import ChannelSpec, CollectiveSpec, Plan
from crossfade.plan.registers import Fault, check_registers
from crossfade.plan.text import format_excerpt, format_plan
from crossfade.plan.waits import Step
from crossfade.types import DRIVER, Transport

__all__ = ["Fault", "find_fault", "validate"]

MOST_ACTIONS_SHOWN = 200
"""Plans with more actions are shown in part."""
LONGEST_CYCLE_SHOWN = 12
LONGEST_NAME_SHOWN = 300
"""Plans with longer names too."""

_ORDERED_ENDS = (Verb.SEND, Verb.RECV)
_OTHER_ENDS = (Verb.WRITE, Verb.READ)

_HINTS = {
    "PL-1": "a channel has one write, and one read in each reader; over gloo, staged, nccl and communicators these are send and "
    "recv, in one order at both ends; "
    "each party of a collective does it once, and all of them do theirs in one order",
    "PL-2": "give all parties the order of one common list of steps; a receive on @recv, a send on @send do not wait",
    "PL-3": "each reader frees each value it has read once, after its last use, in the same round; who starts a collective "
    "on @coll uses or frees an output of it in the same round",
    "PL-4": "run a node on its own actor, once, after its inputs are there; free a value after its last use",
}


def validate(plan: Plan) -> None:
    """Checks a plan. A `PlanError` has the number of the invariant, the step, the reason, and the grid with an arrow (of big plans,
    a part).
    """
    fault = find_fault(plan)
    if fault is None:
        return
    if fault.index is None:
        where, shown = fault.actor, ""
    else:
        where = f"{fault.actor}, step {fault.index}, {str(plan.programs[fault.actor][fault.index])!r}"
        mark = (fault.actor, fault.index)
        is_small = sum(map(len, plan.programs.values())) <= MOST_ACTIONS_SHOWN and _is_narrow(plan)
        shown = "\n" + (format_plan(plan, mark) if is_small else format_excerpt(plan, mark))
    raise PlanError(f"{fault.invariant}: {where}: {fault.reason}{shown}", hint=_HINTS[fault.invariant])


def _is_narrow(plan: Plan) -> bool:
    """Whether no name is so long that the grid's other rows would be mostly padding."""
    names = chain(plan.programs, (action.target for actions in plan.programs.values() for action in actions))
    return max(map(len, names), default=0) <= LONGEST_NAME_SHOWN


def find_fault(plan: Plan) -> Fault | None:
    """The first fault found, or None for a plan that is sound. Takes time linear in the number of actions.

    (With receives that run ahead on ``main`` it can take that times the sum of their ``ahead``.)
    """
    book = Book()
    checks: tuple[Callable[[Plan, Book], Iterator[Fault]], ...] = (
        _check_steps,
        _check_communicators,
        _check_completeness,
        check_registers,
        _check_queues,
        _check_groups,
        _check_waits,
    )
    return next(chain.from_iterable(check(plan, book) for check in checks), None)


# One step at a time


def _check_steps(plan: Plan, book: Book) -> Iterator[Fault]:
    """Each step names things that exist, and is where it belongs, once."""
    readers = {(channel.id, reader) for channel in plan.channels for reader in channel.readers}
    for actor, actions in plan.programs.items():
        for index, action in enumerate(actions):
            for invariant, reason in _wrongs(plan, book, readers, (actor, index), action):
                yield Fault(invariant, actor, index, reason)


def _wrongs(
    plan: Plan, book: Book, readers: set[tuple[str, str]], step: Step, action: Action
) -> Iterator[tuple[str, str]]:
    if action.ahead < 0 or (action.ahead and action.verb is not Verb.RECV):
        yield "PL-1", "only recv may run ahead"
    if action.stream != MAIN and action.verb not in (Verb.SEND, Verb.RECV, Verb.COLL):
        yield "PL-1", "only send, recv and coll may have a stream other than main"
    if action.stream != MAIN and _blocks(plan, action):
        yield "PL-1", "what goes by a communicator blocks, so it is on main"
    if action.verb in PUTS or action.verb in TAKES:
        channel = plan.channel.get(action.target)
        if channel is None:
            yield "PL-4", f"there is no channel {action.target}"
        elif reason := _wrong_end(book, readers, step, action, channel):
            yield "PL-1", reason
    elif action.verb is Verb.RUN:
        node = plan.node.get(action.target)
        if node is None:
            yield "PL-4", f"there is no node {action.target}"
        elif node.actor != step[0]:
            yield "PL-4", f"node {node.id} belongs to {node.actor}"
        elif book.runs.setdefault(node.id, step) != step:
            yield "PL-4", f"node {node.id} is run twice in a round"
    elif action.verb is Verb.COLL:
        collective = plan.collective.get(action.target)
        if collective is None:
            yield "PL-4", f"there is no collective {action.target}"
        elif step[0] not in collective.parties:
            yield "PL-1", f"{step[0]} is no party of collective {collective.id}"
        elif book.colls.setdefault((collective.id, step[0]), step) != step:
            yield "PL-1", f"collective {collective.id} is done twice in a round"


def _blocks(plan: Plan, action: Action) -> bool:
    spec = (plan.collective if action.verb is Verb.COLL else plan.channel).get(action.target)
    return spec is not None and spec.transport.blocks


def _wrong_end(
    book: Book, readers: set[tuple[str, str]], step: Step, action: Action, channel: ChannelSpec
) -> str | None:
    actor = step[0]
    put, take = _ORDERED_ENDS if channel.is_ordered else _OTHER_ENDS
    if action.verb is put:
        if actor != channel.writer:
            return f"the writer of channel {channel.id} is {channel.writer}"
        is_second = book.puts.setdefault(channel.id, step) != step
    elif action.verb is take:
        if (channel.id, actor) not in readers:
            return f"{actor} is no reader of channel {channel.id}"
        is_second = book.takes.setdefault((channel.id, actor), step) != step
    else:
        return f"channel {channel.id} is {channel.transport}: its verbs are {put} and {take}"
    return f"channel {channel.id} has a second {action.verb} in the same round" if is_second else None


def _check_communicators(plan: Plan, book: Book) -> Iterator[Fault]:
    for target, actor, reason in _wrong_communicators(plan):
        step = book.puts.get(target) or book.colls.get((target, actor)) or _any_step(plan)
        yield _fault_near("PL-1", reason, actor, step)


def _wrong_communicators(plan: Plan) -> Iterator[tuple[str, str, str]]:
    """Yields (id of a channel or collective, a party of it, the problem): its communicator is not in the plan, is not
    for all of its parties, or does not fit its transport; or it is a channel by communicator and has not exactly one reader.
    """
    groups = {spec.id: spec.parties for spec in plan.communicators}
    specs: list[tuple[ChannelSpec | CollectiveSpec, tuple[str, ...]]]
    specs = [(spec, (spec.writer, *spec.readers)) for spec in plan.channels]
    specs += [(spec, spec.parties) for spec in plan.collectives]
    for spec, parties in specs:
        name, party = spec.communicator, next(iter(parties), DRIVER)
        if spec.transport.blocks != bool(name):
            yield spec.id, party, f"{spec.id} goes by {spec.transport}, and by the communicator {name or '(none)'}"
        elif name and name not in groups:
            yield spec.id, party, f"{spec.id} goes by the communicator {name}, which the plan does not have"
        elif name and not set(parties) <= set(groups[name]):
            outside = ", ".join(sorted(set(parties) - set(groups[name])))
            yield spec.id, party, f"{spec.id} goes by the communicator {name}, in whose group {outside} is not"
        elif name and isinstance(spec, ChannelSpec) and len(spec.readers) != 1:
            yield spec.id, party, f"channel {spec.id} goes by a communicator to {len(spec.readers)} readers"


# What is missing, and what the lists say twice


def _check_completeness(plan: Plan, book: Book) -> Iterator[Fault]:
    """Both ends of every channel are there, every node is run, and the driver reads every output."""
    if plan.max_inflight < 1:
        reason = f"max_inflight is {plan.max_inflight}, so no execution may begin"
        yield _fault_near("PL-2", reason, DRIVER, _any_step(plan))
    for node in plan.nodes:
        if node.id not in book.runs:
            yield _fault_near("PL-4", f"node {node.id} is never run", node.actor, _consumer(plan, book, node.outputs))
    yield from _duplicates(plan, book)
    for collective in plan.collectives:
        for reason, actor in _wrong_parties(collective, book):
            steps = (book.colls.get((collective.id, party)) for party in collective.parties)
            yield _fault_near("PL-1", reason, actor, next((step for step in steps if step), _any_step(plan)))
    for channel in plan.channels:
        for reason, actor, step in _wrong_channel(channel, book):
            yield _fault_near("PL-1", reason, actor, step or _producer(plan, book, channel.value))
        if channel.credit < 1:
            slots = f" and {channel.slots} slots on devices" if channel.transport is Transport.COPY else ""
            reason = f"the ring of channel {channel.id} has depth {channel.depth}{slots}, so nothing ever fits"
            yield Fault("PL-2", *book.puts[channel.id], reason)
    read = {channel.value for channel in plan.channels if DRIVER in channel.readers}
    for value in plan.outputs:
        if value not in read:
            reason = f"{value} is an output, but no channel brings it to {DRIVER}"
            yield _fault_near("PL-1", reason, DRIVER, _producer(plan, book, value))


def _fault_near(invariant: str, reason: str, actor: str, step: Step | None) -> Fault:
    """A fault of something that is missing: it points at the nearest step that is not."""
    return Fault(invariant, actor, None, reason) if step is None else Fault(invariant, *step, reason)


def _duplicates(plan: Plan, book: Book) -> Iterator[Fault]:
    made = [value.value for value in plan.inputs]
    made += [value for node in plan.nodes for value in node.outputs]
    made += [value for collective in plan.collectives for values in collective.outputs for value in values]
    for value in sorted(set(plan.static).difference(made)):
        yield _fault_near(
            "PL-4", f"{value} is said to have a static shape, and nothing makes it", DRIVER, _any_step(plan)
        )
    for what, ids in (
        ("node", [node.id for node in plan.nodes]),
        ("channel", [channel.id for channel in plan.channels]),
        ("collective", [collective.id for collective in plan.collectives]),
        ("value", made),
    ):
        seen: set[str] = set()
        for id_ in ids:
            if id_ in seen:
                yield _fault_near("PL-4", f"two {what}s are called {id_}", DRIVER, _producer(plan, book, id_))
            seen.add(id_)


def _wrong_parties(collective: CollectiveSpec, book: Book) -> Iterator[tuple[str, str]]:
    """What is wrong with a collective, and with which party."""
    name, parties = f"collective {collective.id}", collective.parties
    if len(set(parties)) < max(1, len(parties)):
        yield f"{name} is not one of different parties", next(iter(parties), DRIVER)
    if DRIVER in parties:
        yield f"{DRIVER} takes part in {name}", DRIVER
    if not 0 <= collective.root < max(1, len(parties)):
        yield f"the root of {name} is no rank", DRIVER
    for party, outputs in zip(parties, collective.outputs, strict=True):
        if (collective.id, party) not in book.colls:
            yield f"{party} has no coll of {name}", party
        if not outputs:
            yield f"{party} gets nothing from {name}", party


def _wrong_channel(channel: ChannelSpec, book: Book) -> Iterator[tuple[str, str, Step | None]]:
    """What is wrong, with which party, and the other end of the channel."""
    put = book.puts.get(channel.id)
    takes = [book.takes.get((channel.id, reader)) for reader in channel.readers]
    nearest = put or next((take for take in takes if take is not None), None)
    verbs = ("send", "recv") if channel.is_ordered else ("write", "read")
    if put is None:
        yield f"{channel.writer} has no {verbs[0]} of channel {channel.id}", channel.writer, nearest
    for reader, take in zip(channel.readers, takes, strict=True):
        if take is None:
            yield f"{reader} has no {verbs[1]} of channel {channel.id}", reader, nearest
    if len(set(channel.readers) | {channel.writer}) <= len(channel.readers):
        yield f"the ends of channel {channel.id} are not different parties", channel.writer, nearest


def _producer(plan: Plan, book: Book, value: str) -> Step | None:
    """The step that makes a value (or, for its id, runs a node), or any step at all."""
    maker = next((node.id for node in plan.nodes if value == node.id or value in node.outputs), "")
    for collective in plan.collectives:
        for party, values in zip(collective.parties, collective.outputs, strict=True):
            if value in values and (collective.id, party) in book.colls:
                return book.colls[collective.id, party]
    return book.runs.get(maker) or book.puts.get(value) or _any_step(plan)


def _consumer(plan: Plan, book: Book, values: tuple[str, ...]) -> Step | None:
    puts = (book.puts.get(channel.id) for channel in plan.channels if channel.value in values)
    return next((put for put in puts if put is not None), None) or _any_step(plan)


def _any_step(plan: Plan) -> Step | None:
    return next(((actor, 0) for actor, actions in plan.programs.items() if actions), None)


# Queues


def _check_queues(plan: Plan, book: Book) -> Iterator[Fault]:
    """What one party sends to another over an ordered transport is received in the order in which it is sent."""
    sent: dict[tuple[Transport, str, str], list[str]] = defaultdict(list)
    received: dict[tuple[Transport, str, str], list[tuple[int, int, str]]] = defaultdict(list)
    for channel_id, (writer, _) in book.puts.items():
        channel = plan.channel[channel_id]
        for reader in channel.readers if channel.is_ordered else ():
            index = book.takes[channel_id, reader][1]
            queue = (channel.transport, writer, reader)
            sent[queue].append(channel_id)
            received[queue].append((-plan.programs[reader][index].ahead, index, channel_id))
    for queue, channel_ids in sent.items():
        yield from _compare(queue[2], channel_ids, sorted(received[queue]))


def _check_groups(plan: Plan, book: Book) -> Iterator[Fault]:
    """What the same actors do together, all of them do in one order."""
    groups: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for collective in plan.collectives:
        groups[collective.group].append(collective.id)
    for group, ids in groups.items():
        order = sorted(ids, key=lambda id_: book.colls[id_, group[0]])
        for party in group[1:]:
            mine = sorted(ids, key=lambda id_: book.colls[id_, party])
            for place, (theirs, own) in enumerate(zip(order, mine, strict=True)):
                if theirs != own:
                    reason = f"{party} does {own} as number {place} where {group[0]} does {theirs}"
                    yield Fault("PL-1", *book.colls[own, party], reason)


def _compare(reader: str, sent: list[str], received: list[tuple[int, int, str]]) -> Iterator[Fault]:
    """One queue: the sends of a round, and the receives of an execution as (-ahead, index, channel), each in order.

    Receives of successive executions must not mix either: the last of one comes before the first of the next.
    """
    for place, (channel_id, (_, index, other_id)) in enumerate(zip(sent, received, strict=True)):
        if channel_id != other_id:
            reason = f"{reader} receives {other_id} as number {place} where {channel_id} is sent"
            yield Fault("PL-1", reader, index, reason)
    (first_round, first, first_id), (last_round, last, last_id) = received[0], received[-1]
    if (first_round + 1, first) < (last_round, last):
        reason = f"{reader} receives the next execution's {first_id} before this execution's {last_id} is received"
        yield Fault("PL-1", reader, first, reason)


# Waits


def _check_waits(plan: Plan, book: Book) -> Iterator[Fault]:
    """No chain of waits leads back to where it began."""
    waits = waits_of(plan, book)
    steps = [step for step, _ in groupby(waits.steps[event] for event in waits.find_cycle())]
    if not steps:
        return
    turn = next((i for i, (step, other) in enumerate(pairwise(steps)) if step[0] != other[0]), 0)
    steps = steps[turn:] + steps[:turn]
    ends = [step for i, step in enumerate(steps) if not steps[i - 1][0] == step[0] == steps[(i + 1) % len(steps)][0]]
    names = [f"{actor} {str(plan.programs[actor][index])!r}" for actor, index in ends or steps]
    if len(names) > LONGEST_CYCLE_SHOWN:
        names = [*names[: LONGEST_CYCLE_SHOWN - 1], f"{len(names) - LONGEST_CYCLE_SHOWN + 1} more"]
    reason = f"each of these waits for the next, and the last for the first: {'; '.join(names)}"
    yield Fault("PL-2", *steps[0], reason)
