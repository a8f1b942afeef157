"""The host's launches in another order: batches on several lanes in turns, instead of one after the other."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from crossfade.profile.doctor.build import LANE_LAG_US
from crossfade.profile.doctor.program import NOBODY, Program, Wait, Work


def in_turns(program: Program, lanes: Collection[int], communicators: Iterable[Sequence[int]] = ()) -> Program:
    """In each step the host launches the work of these lanes in turns, instead of one lane's after the other's.

    The calls of a step change places; each keeps its gap and its length. So does what they launch on lanes that they share, and the
    collectives of each communicator, whichever lanes they are on.
    """
    rows = [list(numbers) for numbers in communicators]
    program = program.with_works(
        {
            number: program.works[number]._replace(
                after=tuple(wait for wait in program.works[number].after if not wait.is_order)
            )
            for row in rows
            for number in row
        }
    )
    launches = _Launches(program, lanes)
    places: dict[int, int] = {}
    for numbers in launches.by_step():
        order = launches.take_turns(numbers)
        places.update(zip(order, sorted(order), strict=True))
    program = replace(program, calls=tuple(launches.calls))
    for row in launches.shared.values():
        program = _in_order_of_calls(program, row, places, keep_lanes=False)
    for row in rows:
        program = _in_order_of_calls(program, row, places, keep_lanes=True)
    return program


class _Launches:
    """The host's calls, to be put into another order within each step.

    Attributes:
        calls: as they are now.
        shared: the works of each lane that is none of those whose work is launched in turns.
    """

    def __init__(self, program: Program, lanes: Collection[int]) -> None:
        self.calls = list(program.calls)
        self.shared: dict[int, list[int]] = {}
        self._program = program
        self._lane_of: dict[int, int] = {}
        self._works: dict[int, list[int]] = {}  # by call
        self._next: dict[int, list[int]] = {}  # by call, those that follow it
        self._meetings: dict[
            int, list[int]
        ] = {}  # by step, in the order of the first rank that was put into another one
        for number, work in enumerate(program.works):
            if work.call == NOBODY:
                continue
            self._works.setdefault(work.call, []).append(number)
            if work.lane in lanes:
                self._lane_of[work.call] = work.lane
            else:
                self.shared.setdefault(work.lane, []).append(number)
        for number, call in enumerate(program.calls):
            self._next.setdefault(call.after, []).append(number)

    def by_step(self) -> Iterable[Sequence[int]]:
        """The calls of each rank and step that launch work of the lanes."""
        found: dict[tuple[int, int], list[int]] = {}
        for number, call in enumerate(self._program.calls):
            if number in self._lane_of:
                found.setdefault((call.rank, call.step), []).append(number)
        return found.values()

    def take_turns(self, numbers: Sequence[int]) -> list[int]:
        """Links the calls from the first of ``numbers`` to the last anew; returns their order."""
        first, last = numbers[0], numbers[-1]
        rank, step = self.calls[first].rank, self.calls[first].step
        between = [number for number in range(first, last + 1) if self.calls[number].rank == rank]
        queues: dict[int, list[int]] = {}
        current = self._lane_of[first]
        for number in between:  # a call that launches nothing of these lanes stays behind the launch before it
            current = self._lane_of.get(number, current)
            queues.setdefault(current, []).append(number)
        in_order = _merged(list(queues.values()), self._needs(between, step))
        self._meetings.setdefault(step, [meeting for number in in_order for meeting in self._meetings_of(number)])
        calls = self.calls
        calls[in_order[0]] = calls[in_order[0]]._replace(after=calls[first].after)
        for earlier, later in pairwise(in_order):
            calls[later] = calls[later]._replace(after=earlier)
        for number in self._next.get(last, ()):
            if number > last:
                calls[number] = calls[number]._replace(after=in_order[-1])
        return in_order

    def _meetings_of(self, call: int) -> list[int]:
        works = (self._program.works[number] for number in self._works.get(call, ()))
        return [work.meeting for work in works if work.meeting != NOBODY]

    def _needs(self, between: Sequence[int], step: int) -> Mapping[int, set[int]]:
        """Which calls come before each: those that launch what it or its work waits for. Ranks start collectives in one order."""
        works, own = self._program.works, set(between)
        needs = {}
        for number in between:
            waits = [
                *self._program.calls[number].waits,
                *(w for n in self._works.get(number, ()) for w in works[n].after),
            ]
            needs[number] = ({works[wait.work].call for wait in waits} & own) - {number}
        call_of = {meeting: number for number in between for meeting in self._meetings_of(number)}
        met = [call_of[meeting] for meeting in self._meetings.get(step, ()) if meeting in call_of]
        for earlier, later in pairwise(met):
            needs[later] |= {earlier} - {later}
        return needs


def _merged(queues: Sequence[Sequence[int]], needs: Mapping[int, set[int]]) -> list[int]:
    """The queues' calls, in turns by how far each queue has come; none before the calls that it needs."""
    in_order, placed, places = list[int](), set[int](), [0] * len(queues)
    while len(in_order) < sum(map(len, queues)):
        heads = [
            (place / len(queue), queue[place], which)
            for which, (place, queue) in enumerate(zip(places, queues, strict=True))
            if place < len(queue)
        ]
        # The earliest of all has what it needs, as in the trace.
        earliest = min(heads, key=lambda head: head[1])
        _, number, which = min((head for head in heads if needs[head[1]] <= placed), default=earliest)
        in_order.append(number)
        placed.add(number)
        places[which] += 1
    return in_order


def _in_order_of_calls(
    program: Program, numbers: Sequence[int], places: Mapping[int, int], *, keep_lanes: bool
) -> Program:
    """These works run in the order in which they are launched now, each behind the one before it.

    Without their lanes, whose order is that of before, each gets one of its own.
    """
    order = sorted(numbers, key=lambda n: places.get(program.works[n].call, program.works[n].call))
    if order == list(numbers) and not keep_lanes:
        return program
    changed: dict[int, Work] = {}
    last = max(work.lane for work in program.works)
    for before, number in zip([NOBODY, *order], order, strict=False):
        last += 1
        work = program.works[number]
        waits = () if before == NOBODY else (Wait(before, min(work.lane_lag_us, LANE_LAG_US)),)
        changed[number] = work._replace(lane=work.lane if keep_lanes else last, after=(*work.after, *waits))
    return program.with_works(changed)
