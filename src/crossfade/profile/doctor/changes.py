"""What a fix would change in a `Program`. Each function gives a changed program and leaves the one it got alone."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from statistics import median

from crossfade.profile.doctor.build import LANE_LAG_US, LAUNCH_LAG_US
from crossfade.profile.doctor.program import NOBODY, HostCall, Program, Wait, Work
from crossfade.profile.traces.events import ActivityKind
from crossfade.profile.traces.waits import EVENT_LAG_US

_CALL_US = 5.0  # a call that does not wait


def without_waits(program: Program, calls: Iterable[int]) -> Program:
    """The host does not wait in these calls."""
    changed = {}
    for number in calls:
        call = program.calls[number]
        changed[number] = call._replace(waits=(), own_us=min(call.own_us, _CALL_US))
    return program.with_calls(changed)


def without_calls(program: Program, calls: Iterable[int]) -> Program:
    """These calls are not made: they take no time, nor do what they launch."""
    gone = set(calls)
    works = {
        number: work._replace(amount_us=0.0, after=())
        for number, work in enumerate(program.works)
        if work.call in gone and work.meeting == NOBODY
    }
    changed = {number: program.calls[number]._replace(waits=(), own_us=0.0) for number in gone}
    return program.with_calls(changed).with_works(works)


def without_edges(program: Program, edges: Collection[tuple[int, int]]) -> Program:
    """The first work of each pair does not wait for the second one."""
    changed = {}
    for number in {target for target, _ in edges}:
        work = program.works[number]
        changed[number] = work._replace(after=tuple(wait for wait in work.after if (number, wait.work) not in edges))
    return program.with_works(changed)


def behind(program: Program, sources: Mapping[int, int]) -> Program:
    """Each of these works is launched right behind another work, and waits for that alone."""
    changed = {}
    for number, source in sources.items():
        work, call = program.works[number], program.works[source].call
        after = (Wait(source, EVENT_LAG_US),) if work.lane != program.works[source].lane else ()
        changed[number] = work._replace(
            after=after, call=work.call if call == NOBODY else call, launch_lag_us=LAUNCH_LAG_US
        )
    return program.with_works(changed)


def without_collectives(program: Program, works: Iterable[int]) -> Program:
    """These collectives are not made: their ranks neither meet nor move anything."""
    return program.with_works({n: program.works[n]._replace(amount_us=0.0, meeting=NOBODY) for n in works})


def with_scaled_work(program: Program, amounts_us: Mapping[int, float]) -> Program:
    """These works take that long alone."""
    return program.with_works({n: program.works[n]._replace(amount_us=amount) for n, amount in amounts_us.items()})


def with_free_launches(program: Program) -> Program:
    """The host is always far ahead, but where it waits for the GPU: an upper bound of what CUDA graphs or a compiler win."""
    return replace(
        program, calls=tuple(call._replace(gap_us=0.0, own_us=min(call.own_us, 0.5)) for call in program.calls)
    )


def without_profiler(program: Program, event_us: float, least: float) -> Program:
    """The host as nothing records it: each of the profiler's events took it so long. At least that share of its time is its own."""
    launching = {work.call for work in program.works}
    calls = []
    for number, call in enumerate(program.calls):
        length_us = call.gap_us + call.own_us * (number in launching)
        saved_us = min(event_us * call.num_events, (1.0 - least) * length_us)
        of_gap_us = min(saved_us, call.gap_us)
        calls.append(call._replace(gap_us=call.gap_us - of_gap_us, own_us=call.own_us - (saved_us - of_gap_us)))
    return replace(program, calls=tuple(calls))


def without_contention(program: Program) -> Program:
    """Communication and computation do not slow each other down."""
    return replace(program, works=tuple(work._replace(rate=1.0) for work in program.works))


def without_lateness(program: Program, works: Collection[int]) -> Program:
    """These works start as soon as all that they wait for is done."""
    changed = {}
    for number in works:
        work = program.works[number]
        after = tuple(wait._replace(lag_us=min(wait.lag_us, EVENT_LAG_US)) for wait in work.after)
        changed[number] = work._replace(
            launch_lag_us=min(work.launch_lag_us, LAUNCH_LAG_US),
            lane_lag_us=min(work.lane_lag_us, LANE_LAG_US),
            after=after,
        )
    return program.with_works(changed)


def without_order(program: Program, works: Collection[int]) -> Program:
    """Each of these collectives has a lane of its own, and does not wait for the one before it."""
    lane = max(work.lane for work in program.works)
    moved = set(works)
    changed = {}
    for number, work in enumerate(program.works):
        after = tuple(wait for wait in work.after if not (wait.is_order and (number in moved or wait.work in moved)))
        if number in moved:
            lane += 1
            changed[number] = work._replace(lane=lane, after=after)
        elif len(after) < len(work.after):
            changed[number] = work._replace(after=after)
    return program.with_works(changed)


def beside_their_callers(program: Program, works: Collection[int], until: Callable[[int], int]) -> Program:
    """These collectives run on a lane beside their caller's, which waits for each only before the work ``until`` gives.

    A collective still waits for what was before it on its caller's lane. ``until`` gives `NOBODY` for one that nobody needs.
    """
    moved = set(works)
    last = max(work.lane for work in program.works)
    lanes: dict[int, int] = {}
    before: dict[int, int] = {}
    changed: dict[int, Work] = {}
    for number, work in enumerate(program.works):
        if number in moved:
            lane = lanes.setdefault(work.lane, last + 1 + len(lanes))
            own = work.after if work.lane not in before else (*work.after, Wait(before[work.lane], work.lane_lag_us))
            changed[number] = work._replace(lane=lane, after=own)
        else:
            before[work.lane] = number
            kept = tuple(wait for wait in work.after if wait.work not in moved or wait.is_order)
            if len(kept) < len(work.after):
                changed[number] = work._replace(after=kept)
    for number in works:
        needed = until(number)
        if needed != NOBODY:
            there = changed.get(needed, program.works[needed])
            changed[needed] = there._replace(after=(*there.after, Wait(number, 3.0)))
    return program.with_works(changed)


def balanced(program: Program) -> Program:
    """In each step all ranks compute equally long, and their hosts take equally long."""
    compute = [[0.0] * program.num_steps for _ in range(program.num_ranks)]
    host = [[0.0] * program.num_steps for _ in range(program.num_ranks)]
    for work in program.works:
        if work.kind is ActivityKind.COMPUTE:
            compute[work.rank][work.step] += work.amount_us
    for call in program.calls:
        host[call.rank][call.step] += call.gap_us
    share = _shares_of_mean(compute)
    host_share = _shares_of_mean(host)
    works = tuple(
        work._replace(amount_us=work.amount_us * share[work.rank][work.step])
        if work.kind is ActivityKind.COMPUTE
        else work
        for work in program.works
    )
    calls = tuple(call._replace(gap_us=call.gap_us * host_share[call.rank][call.step]) for call in program.calls)
    return replace(program, works=works, calls=calls)


def _shares_of_mean(times: Sequence[Sequence[float]]) -> list[list[float]]:
    means = [sum(of_ranks) / len(of_ranks) for of_ranks in zip(*times, strict=True)]
    return [[mean / time if time else 1.0 for time, mean in zip(of_rank, means, strict=True)] for of_rank in times]


def sent_as_one(program: Program, groups: Iterable[Sequence[int]], saved_us: float) -> Program:
    """Each group of collectives of one rank is launched once: all but one save that much time, and the host the time of a launch.

    From one launch to the next a host takes the group's median time at most: what is longer is something else.
    """
    launching = {work.call for work in program.works}
    amounts: dict[int, float] = {}
    calls: dict[int, HostCall] = {}
    for group in groups:
        amounts.update({number: max(program.works[number].amount_us - saved_us, 0.1) for number in group[:-1]})
        spans = []
        for first, last in pairwise(program.works[number].call for number in group):
            if first != NOBODY and not any(call in launching for call in range(first + 1, last)):
                between = range(first + 1, last + 1)
                spans.append((sum(program.calls[n].gap_us + program.calls[n].own_us for n in between), between))
        usual_us = median(length_us for length_us, _ in spans) if spans else 0.0
        for length_us, between in spans:
            left = 1.0 - min(usual_us / length_us, 1.0) if length_us else 0.0
            for number in between:
                call = program.calls[number]
                calls[number] = call._replace(gap_us=call.gap_us * left, own_us=call.own_us * left)
    return with_scaled_work(program, amounts).with_calls(calls)


def in_pieces(program: Program, works: Sequence[int], num_pieces: int, sources: Mapping[int, Sequence[int]]) -> Program:
    """Each of these collectives is sent in equal pieces: the last as before, each other one as soon as its source is done.

    Args:
        program: what is changed.
        works: the collectives; all parts of a meeting are among them.
        num_pieces: how many pieces each has.
        sources: for each, ``num_pieces - 1`` kernels of its rank, by start.
    """
    pieces: dict[int, list[Work]] = {}
    meetings = max((work.meeting for work in program.works), default=NOBODY) + 1
    numbers: dict[tuple[int, int], int] = {}
    for number in works:
        work = program.works[number]._replace(amount_us=program.works[number].amount_us / num_pieces)
        pieces[number] = []
        for place, source in enumerate(sources[number]):
            meeting = NOBODY
            if work.meeting != NOBODY:
                meeting = meetings + numbers.setdefault((work.meeting, place), len(numbers))
            after = (Wait(source, 3.0),)
            piece = work._replace(call=program.works[source].call, launch_lag_us=7.0, after=after, meeting=meeting)
            pieces[number].append(piece)
    return _with_pieces(program, pieces, num_pieces)


def _with_pieces(program: Program, pieces: Mapping[int, Sequence[Work]], num_pieces: int) -> Program:
    """Puts new works before old ones, which keep a piece of their amount; all numbers are given anew."""
    places: list[int] = []
    num = 0
    for number in range(len(program.works)):
        num += len(pieces.get(number, ()))
        places.append(num)
        num += 1

    def moved(waits: tuple[Wait, ...]) -> tuple[Wait, ...]:
        return tuple(wait._replace(work=places[wait.work]) for wait in waits)

    works: list[Work] = []
    for number, work in enumerate(program.works):
        new = pieces.get(number, ())
        works += [piece._replace(after=moved(piece.after)) for piece in new]
        amount = work.amount_us / num_pieces if new else work.amount_us
        works.append(work._replace(after=moved(work.after), amount_us=amount))
    calls = tuple(call._replace(waits=moved(call.waits)) for call in program.calls)
    return replace(program, calls=calls, works=tuple(works))
