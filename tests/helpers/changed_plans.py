"""Plans with one thing changed, at random."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from random import Random

from crossfade.plan.actions import COLL_STREAM, MAIN, Action, Verb
from crossfade.plan.plan import Plan

__all__ = ["MUTATIONS", "mutated"]


def mutated(plan: Plan, kind: str, rng: Random) -> Plan | None:
    """The plan with a random change of one of the kinds of ``MUTATIONS``, or None where it has nothing to change so."""
    return MUTATIONS[kind](plan, rng)


def _places(plan: Plan, *verbs: Verb) -> list[tuple[str, int]]:
    return [
        (actor, index)
        for actor, actions in plan.programs.items()
        for index, action in enumerate(actions)
        if action.verb in verbs
    ]


def _with(plan: Plan, actor: str, actions: list[Action]) -> Plan:
    return replace(plan, programs={**plan.programs, actor: tuple(actions)})


def _swapped(plan: Plan, rng: Random, verb: Verb) -> Plan | None:
    pairs = [(a, b) for a in _places(plan, verb) for b in _places(plan, verb) if a[0] == b[0] and a[1] < b[1]]
    if not pairs:
        return None
    (actor, i), (_, j) = rng.choice(pairs)
    actions = list(plan.programs[actor])
    actions[i], actions[j] = actions[j], actions[i]
    return _with(plan, actor, actions)


def _swap_adjacent(plan: Plan, rng: Random) -> Plan | None:
    places = [place for place in _places(plan, *Verb) if place[1]]
    if not places:
        return None
    actor, i = rng.choice(places)
    actions = list(plan.programs[actor])
    actions[i - 1], actions[i] = actions[i], actions[i - 1]
    return _with(plan, actor, actions)


def _cross(plan: Plan, rng: Random) -> Plan | None:
    """A step goes to another place in its program."""
    actor, i = rng.choice(_places(plan, *Verb))
    actions = list(plan.programs[actor])
    action = actions.pop(i)
    actions.insert(rng.randint(0, len(actions)), action)
    return _with(plan, actor, actions)


def _changed(plan: Plan, rng: Random, change: Callable[[Action], list[Action]], *verbs: Verb) -> Plan | None:
    """One step with one of the verbs becomes what ``change`` says."""
    places = _places(plan, *verbs)
    if not places:
        return None
    actor, i = rng.choice(places)
    actions = list(plan.programs[actor])
    actions[i : i + 1] = change(actions[i])
    return _with(plan, actor, actions)


def _to_main(plan: Plan, rng: Random) -> Plan | None:
    verb = rng.choice([Verb.SEND, Verb.RECV, Verb.COLL])
    return _changed(plan, rng, lambda action: [replace(action, stream=MAIN)], verb)


def _other_party(plan: Plan, rng: Random) -> Plan | None:
    """A collective has one party more, or one fewer, and no step for it is added or removed."""
    if not plan.collectives:
        return None
    place = rng.randrange(len(plan.collectives))
    old = plan.collectives[place]
    absent = [actor for actor in plan.programs if actor not in old.parties]
    if absent and rng.random() < 0.5:
        new = replace(
            old,
            parties=(*old.parties, rng.choice(absent)),
            inputs=(*old.inputs, ()),
            outputs=(*old.outputs, (f"{old.id}.extra",)),
        )
    else:
        new = replace(old, parties=old.parties[1:], inputs=old.inputs[1:], outputs=old.outputs[1:])
    return replace(plan, collectives=(*plan.collectives[:place], new, *plan.collectives[place + 1 :]))


def _depth_one(plan: Plan, rng: Random) -> Plan | None:
    channels = (replace(channel, depth=1, slots=min(channel.slots, 1)) for channel in plan.channels)
    return replace(plan, channels=tuple(channels))


def _further_ahead(plan: Plan, rng: Random) -> Plan | None:
    by = rng.randint(1, 2)
    return _changed(plan, rng, lambda action: [replace(action, ahead=action.ahead + by)], Verb.RECV)


MUTATIONS: Mapping[str, Callable[[Plan, Random], Plan | None]] = {
    "swapped sends": lambda plan, rng: _swapped(plan, rng, Verb.SEND),
    "swapped recvs": lambda plan, rng: _swapped(plan, rng, Verb.RECV),
    "swapped neighbours": _swap_adjacent,
    "missing free": lambda plan, rng: _changed(plan, rng, lambda action: [], Verb.FREE),
    "free twice": lambda plan, rng: _changed(plan, rng, lambda action: [action, action], Verb.FREE),
    "missing write": lambda plan, rng: _changed(plan, rng, lambda action: [], Verb.WRITE, Verb.SEND),
    "missing read": lambda plan, rng: _changed(plan, rng, lambda action: [], Verb.READ, Verb.RECV),
    "missing run": lambda plan, rng: _changed(plan, rng, lambda action: [], Verb.RUN),
    "any step twice": lambda plan, rng: _changed(plan, rng, lambda action: [action, action], *Verb),
    "crossed order": _cross,
    "depth 1": _depth_one,
    "further ahead": _further_ahead,
    "on main": _to_main,
    "swapped colls": lambda plan, rng: _swapped(plan, rng, Verb.COLL),
    "missing coll": lambda plan, rng: _changed(plan, rng, lambda action: [], Verb.COLL),
    "coll started only": lambda plan, rng: _changed(
        plan, rng, lambda action: [replace(action, stream=COLL_STREAM)], Verb.COLL
    ),
    "other party": _other_party,
}
"""What can be changed: by name, a function from a plan to a changed one, or to None where the plan has no such step."""
