"""Which write of a plan is over before which other one in every execution, because of what parties wait for.

A step comes after the one before it on its party, and after the steps that bring what it needs. Each step that is come to has a
*level*, the length of the longest chain before it, so a step is never before one of a lower or the same level: that answers nearly
all questions. The others are answered by a search backwards, which looks at steps of levels in between only.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence

from crossfade.plan.actions import MAIN, TAKES, Action, Verb
from crossfade.plan.plan import ChannelSpec, Plan
from crossfade.plan.text import values_used

_Step = tuple[str, int]
_MAKE_FACTS = frozenset({Verb.WRITE, Verb.SEND, Verb.COLL})


class Order:
    """The order of one plan's steps within an execution. A plan that stops leaves what it does not come to without one."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._sources = _sources(plan)
        self._levels: dict[str, list[int]] = {party: [] for party in plan.programs}
        self._makers: dict[str, _Step] = {}  # the step that makes each fact true
        self._go_through()

    def is_written_before(self, one: ChannelSpec, other: ChannelSpec) -> bool:
        """Whether ``one`` is always written before ``other``. Not if either is never written."""
        ends = [self._makers.get(f"{channel.id} by {channel.writer}") for channel in (one, other)]
        if ends[0] is None or ends[1] is None:
            return False
        return self._leads_to(ends[0], ends[1])

    def _leads_to(self, start: _Step, end: _Step) -> bool:
        least = self._level(start)
        seen: dict[str, int] = {}  # by party, up to which step it has been looked at
        pending = [end]
        while pending:
            party, last = pending.pop()
            if party == start[0] and last >= start[1]:
                return True
            for place in range(last, seen.get(party, -1), -1):
                if self._levels[party][place] <= least:
                    break
                action = self._plan.programs[party][place]
                pending += (self._makers[fact] for fact in self._needs(action, party))
            seen[party] = max(last, seen.get(party, -1))
        return False

    def _level(self, step: _Step) -> int:
        return self._levels[step[0]][step[1]]

    def _go_through(self) -> None:
        """Each party goes through its program once, and waits where a fact is missing."""
        waiting: dict[str, list[str]] = defaultdict(list)
        ready = deque(self._plan.programs)
        while ready:
            party = ready.popleft()
            actions, levels = self._plan.programs[party], self._levels[party]
            for place in range(len(levels), len(actions)):
                action = actions[place]
                level = levels[-1] if levels else -1
                needs = self._needs(action, party)
                missing = [fact for fact in needs if fact not in self._makers]
                if missing:
                    waiting[missing[0]].append(party)
                    break
                for fact in needs:
                    level = max(level, self._level(self._makers[fact]))
                levels.append(level + 1)
                if action.verb in _MAKE_FACTS:
                    fact = f"{action.target} by {party}"
                    self._makers[fact] = party, place
                    ready.extend(waiting.pop(fact, ()))

    def _needs(self, action: Action, party: str) -> Sequence[str]:
        """The facts without which a party does not go past an action."""
        if action.verb in TAKES:
            is_waited_for = action.verb is Verb.READ or (action.stream == MAIN and not action.ahead)
            return (f"{action.target} by {self._plan.channel[action.target].writer}",) if is_waited_for else ()
        sources = self._sources.get(party)
        if sources is None:
            return ()
        return [fact for value in values_used(self._plan, action, party) for fact in sources.get(value, ())]


def _sources(plan: Plan) -> Mapping[str, Mapping[str, tuple[str, ...]]]:
    """What has to be over before a party uses a value that comes in the background, by party and value."""
    found: dict[str, dict[str, tuple[str, ...]]] = defaultdict(dict)
    for channel in plan.channels:
        for reader in channel.readers if channel.is_ordered else ():
            found[reader][channel.value] = (f"{channel.id} by {channel.writer}",)
    for collective in plan.collectives:
        joined = tuple([f"{collective.id} by {other}" for other in collective.parties])
        for party in collective.parties:
            found[party].update(dict.fromkeys(collective.outputs_of(party), joined))
    return found
