"""The turns of a party's pushes among those of others, as a plan gives them."""

from __future__ import annotations

import mmap
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence

from crossfade.device.signals import Counter, SignalBoard
from crossfade.edges.turns import Progress, TurnRules, Turns
from crossfade.engines.board import RingPlace, layout_of, places
from crossfade.host.doorbell import Bell
from crossfade.plan.plan import Plan
from crossfade.plan.turns import LARGE_BYTES, LINK_GBS, predecessors, targets

_RULES = TurnRules(LARGE_BYTES, LINK_GBS)


class DeviceTurns:
    """Opens the turns of one party's copy channels."""

    def __init__(self, plan: Plan, signals: Sequence[SignalBoard], wake_in: Callable[[float], None]) -> None:
        self._plan = plan
        # All of the plan's, as each of the party's devices sees them, in the order of its devices; none where there are no copy
        # channels.
        self._signals = signals
        self._wake_in = wake_in
        self._before = predecessors(plan)
        hosts = dict.fromkeys(plan.hosts.values()) or [""]
        self._places = {place.spec.id: place for host in hosts for place in places(plan, host) if place.lanes}
        self._awaited: dict[str, list[Counter]] = defaultdict(list)

    def open(self, place: RingPlace, board: mmap.mmap, bells: Mapping[str, Bell]) -> Turns | None:
        """The turns of a channel that the party writes; None if it has none. ``bells``: of all that the party knows."""
        spec, layout = place.spec, layout_of(place)
        own: dict[int, Progress] = {}
        before: dict[int, list[Progress]] = {}
        writers: set[str] = set()
        for index, reader in enumerate(spec.readers):
            after = [channel for (channel, where), other in self._before.items() if (where, other) == (reader, spec.id)]
            writers.update(self._plan.channel[channel].writer for channel in after)
            lanes = range(index * layout.num_sources, (index + 1) * layout.num_sources)
            if after:
                own |= {lane: self._progress(place, lane, lane % layout.num_sources, board) for lane in lanes}
            other = self._before.get((spec.id, reader))
            if other is not None:
                before |= {
                    lane: self._progress_of(other, spec.writer, reader, lane % layout.num_sources, board)
                    for lane in lanes
                }
        if not (own or before):
            return None
        after_bells = [bells[writer] for writer in sorted(writers)]
        return Turns(_RULES, layout.num_sources, own, before, after_bells, self._wake_in)

    def _progress_of(self, channel: str, writer: str, reader: str, source: int, board: mmap.mmap) -> list[Progress]:
        """How far a channel's lanes are that end on the device to which one of the writer's devices pushes."""
        place = self._places[channel]
        num_sources, index = layout_of(place).num_sources, place.spec.readers.index(reader)
        target = targets(self._plan, writer, reader)[source]
        theirs = targets(self._plan, place.spec.writer, reader)
        found = [
            self._progress(place, index * num_sources + other, source, board)
            for other in range(num_sources)
            if theirs[other] == target
        ]
        self._awaited[place.spec.writer] += [each.counter for each in found]
        return found

    def _progress(self, place: RingPlace, lane: int, source: int, board: mmap.mmap) -> Progress:
        layout = layout_of(place)
        label = f"pushed of {place.spec.id} to {place.spec.readers[lane // layout.num_sources]}"
        counter = self._signals[source].counter(place.first_signal + layout.pushed(lane), label)
        return Progress(board, place.lanes_offset + layout.progress(lane), counter)

    def end(self) -> None:
        """No push of this party waits any more."""
        self._awaited.clear()

    def awaited(self, peer: str) -> Iterable[Counter]:
        """What a peer sets and pushes of this party may wait for. Any thread may ask."""
        return list(self._awaited.get(peer, ()))
