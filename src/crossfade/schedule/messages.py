"""Passes 4 to 6: insert the moves of values, release values after their last use, and overlap the moves with the work."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence

from crossfade.plan.actions import CALLS, MAIN, PUTS, RECV_STREAM, SEND_STREAM, TAKES, Action, Verb
from crossfade.plan.plan import ChannelSpec
from crossfade.schedule.draft import Draft
from crossfade.types import DRIVER, Transport


def add_messages(draft: Draft) -> Draft:
    """Writes and sends right after the value is made, reads and receives right before its first use.

    Copies between GPUs, which the device carries out alone, come before what the host does itself, by their turns. A read of one
    stays at its use: it makes the compute stream wait.

    On ordered transports the receives of one pair of actors must come in the order of the sends (PL-1), so one may come
    earlier than its use; never later, and never before the sends it depends on. What blocks both sides has the same place in the
    common order at both: right behind the step that makes the value, in the order of the values. So no party waits for one that
    waits for a later transfer (PL-2).
    """
    outgoing: dict[str, list[ChannelSpec]] = defaultdict(list)
    incoming: dict[tuple[str, str], ChannelSpec] = {}
    for spec in draft.channels:
        outgoing[spec.value].append(spec)
        for reader in spec.readers:
            incoming[reader, spec.value] = spec
    blocking: dict[str, list[ChannelSpec]] = defaultdict(list)
    for (reader, _), spec in incoming.items():
        if spec.transport.blocks:
            blocking[reader].append(spec)
    values = draft.values()
    places = _places(draft)
    senders = {spec.id: (index, spec.writer) for index, spec in enumerate(draft.channels)}
    for party, actions in draft.programs.items():
        if party != DRIVER:
            uses = [(action, *values[party][action.verb, action.target]) for action in actions]
            draft.programs[party] = _order_receives(
                senders, _with_moves(party, uses, incoming, outgoing, places, blocking[party])
            )
    writes = [_move_out(spec) for item in draft.inputs for spec in outgoing[item.value]]
    wanted = set(draft.outputs)
    reads = [_move_in(incoming[DRIVER, value]) for value in draft.maker if value in wanted]  # as they are made
    draft.programs[DRIVER] = [*writes, *reads]
    return draft


def _with_moves(
    party: str,
    uses: Iterable[tuple[Action, tuple[str, ...], tuple[str, ...]]],
    incoming: dict[tuple[str, str], ChannelSpec],
    outgoing: dict[str, list[ChannelSpec]],
    places: Mapping[str, tuple[int, int]],
    mine: Iterable[ChannelSpec],
) -> list[Action]:
    """The actions of one party with its moves. ``mine`` are the channels to it that block."""
    program: list[Action] = []
    here: set[str] = set()
    blocking = deque(sorted(mine, key=lambda spec: places[spec.value]))

    def receive_before(place: tuple[int, int]) -> None:
        while blocking and places[blocking[0].value] < place:
            here.add(blocking[0].value)
            program.append(_move_in(blocking.popleft()))

    for action, inputs, outputs in uses:
        receive_before((places[outputs[0]][0], -1))
        for value in inputs:
            if value not in here and (party, value) in incoming:
                program.append(_move_in(incoming[party, value]))
            here.add(value)
        program.append(action)
        here.update(outputs)
        leaving = [spec for value in outputs for spec in outgoing[value]]
        for spec in sorted(leaving, key=_push_order) if len(leaving) > 1 else leaving:
            if spec.transport.blocks:
                receive_before(places[spec.value])
            program.append(_move_out(spec))
    return program


def _push_order(spec: ChannelSpec) -> tuple[bool, bool, int]:
    return spec.transport.blocks, spec.transport is not Transport.COPY, spec.turn


def _places(draft: Draft) -> dict[str, tuple[int, int]]:
    """Returns for each value the position of the step that makes it (the same for all values of a collective), and its own."""
    steps = {value: place for place, value in enumerate(draft.maker)}
    places = {value: (place, place) for value, place in steps.items()}
    for collective in draft.collectives:
        step = steps[collective.outputs[0][0]]
        places |= {value: (step, steps[value]) for values in collective.outputs for value in values}
    return places


def _move_in(spec: ChannelSpec) -> Action:
    return Action(Verb.RECV if spec.is_ordered else Verb.READ, spec.id)


def _move_out(spec: ChannelSpec) -> Action:
    return Action(Verb.SEND if spec.is_ordered else Verb.WRITE, spec.id)


def _order_receives(senders: dict[str, tuple[int, str]], program: list[Action]) -> list[Action]:
    """Moves receives up until those from one sender come in the order of its sends. ``senders`` has, for each channel, its place in
    the order of the values, and its writer.
    """
    place: dict[str, int] = {}
    earliest: dict[str, int] = {}
    receives = [(index, action) for index, action in enumerate(program) if action.verb is Verb.RECV]
    if not receives:
        return program
    for index, action in sorted(receives, key=lambda item: senders[item[1].target], reverse=True):
        source = senders[action.target][1]
        place[action.target] = earliest[source] = min(index, earliest.get(source, index))
    before: dict[int, list[Action]] = defaultdict(list)
    for _, action in sorted(receives, key=lambda item: senders[item[1].target]):
        before[place[action.target]].append(action)
    ordered: list[Action] = []
    for index, action in enumerate(program):
        ordered += before[index]
        if action.verb is not Verb.RECV:
            ordered.append(action)
    return ordered


def add_frees(draft: Draft) -> Draft:
    """Every party releases a value after its last use: as soon as it has written what it made of it.

    Whoever waits for what was made waits no longer than it must, and letting go comes in the same round, so credits still are for
    earlier executions only (PL-2).
    """
    value_of = {spec.id: spec.value for spec in draft.channels}
    values = draft.values()
    frees = {value: Action(Verb.FREE, value) for value in draft.maker}
    for party, actions in draft.programs.items():
        last: dict[str, int] = {}
        for index, action in enumerate(actions):
            if action.verb in CALLS:
                inputs, outputs = values[party][action.verb, action.target]
                last.update(dict.fromkeys(inputs, index))
                is_started = action.stream != MAIN
                # To free what is not there yet is to wait for it: at the end, if nobody uses it.
                last.update(dict.fromkeys(outputs, len(actions) - 1 if is_started else index))
            elif party != DRIVER or action.verb is Verb.READ:
                last[value_of[action.target]] = index
        ending: dict[int, list[Action]] = defaultdict(list)
        for value, index in last.items():
            ending[_behind_writes(actions, index)].append(frees[value])
        program = draft.programs[party] = []
        for index, action in enumerate(actions):
            program.append(action)
            program += ending.get(index, ())
    return draft


def _behind_writes(actions: Sequence[Action], index: int) -> int:
    """Where the writes end that directly follow an action; those never wait for a transfer."""
    if actions[index].verb is Verb.RUN:
        while index + 1 < len(actions) and actions[index + 1].verb is Verb.WRITE:
            index += 1
    return index


def hoist_receives(draft: Draft) -> Draft:
    """Starts every receive at the beginning of the round, and as many executions ahead as its ring has slots to spare.

    Only receives that transports carry out in the background move: reading shared memory is looking at it, and what a GPU pushes
    comes without being asked for.
    """
    spare = {spec.id: spec.depth - 1 for spec in draft.channels if spec.is_ordered and not spec.transport.blocks}
    for party, actions in draft.programs.items():
        receives = [action.target for action in actions if action.target in spare and action.verb in TAKES]
        if receives:
            ahead = min(spare[target] for target in receives)
            started = [Action(Verb.RECV, target, RECV_STREAM, ahead) for target in receives]
            others = [action for action in actions if not (action.target in spare and action.verb in TAKES)]
            draft.programs[party] = [*started, *others]
    return draft


def trail_sends(draft: Draft) -> Draft:
    """Makes sends only start in the background, except those that block; the ring's slots limit how far they may trail."""
    trailing = {spec.id for spec in draft.channels if spec.is_ordered and not spec.transport.blocks}
    for party, actions in draft.programs.items():
        draft.programs[party] = [
            Action(Verb.SEND, action.target, SEND_STREAM)
            if action.target in trailing and action.verb in PUTS and action.stream == MAIN
            else action
            for action in actions
        ]
    return draft
