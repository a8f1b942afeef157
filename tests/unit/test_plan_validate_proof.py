"""The validator's verdict against that of an exhaustive search of interleavings, and how its work grows."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from random import Random
from types import FrameType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crossfade.plan.actions import COLL_STREAM, MAIN, Action, Verb
from crossfade.plan.parse import parse_plan
from crossfade.plan.plan import Plan
from crossfade.plan.validate import find_fault
from crossfade.types import Transport
from tests.helpers.counts import num
from tests.helpers.edited_plans import CHAIN, QUEUE, edited
from tests.helpers.explore import explore, may_pass
from tests.helpers.plans import Size, chain_plan, sound_plan


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


NUM_SEEDS = num(320, 8_000)
CHANGES_PER_PLAN = 3
NUM_FAILING_SEEDS = num(400, 8_000)
MOST_STATES = 60_000
RARE = ("coll started only", "swapped colls")
"""What is tried wherever a plan has such steps, since few have."""


def changed_plans(rng: Random, plan: Plan) -> Iterator[tuple[str, Plan]]:
    """The plan with one change, of several kinds; then with a receive that is moved ahead, on main, or both."""
    kinds = list(MUTATIONS)
    rng.shuffle(kinds)
    changes = [(kind, changed) for kind in kinds if (changed := mutated(plan, kind, rng)) is not None]
    yield from changes[:CHANGES_PER_PLAN]
    yield from (change for change in changes[CHANGES_PER_PLAN:] if change[0] in RARE)
    on_main = mutated(plan, "on main", rng)
    if on_main is not None and rng.random() < 0.5:
        for kind in ("further ahead", "swapped neighbours"):
            twice = mutated(on_main, kind, rng)
            if twice is not None:
                yield f"on main, {kind}", twice


def check_verdict(plan: Plan) -> str:
    """The validator's verdict, which must be the machine's, and which names a step."""
    fault = find_fault(plan)
    explored = explore(plan)
    assert (fault is None) == (explored.verdict == "ok"), f"{fault}, but {explored}\n{plan}"
    if fault is None:
        return "ok"
    assert fault.index is not None
    assert 0 <= fault.index < len(plan.programs[fault.actor])
    return fault.invariant


@pytest.mark.soak
def test_pl1_to_pl4_the_verdict_is_that_of_all_interleavings() -> None:
    """On every plan. And the comparison means something: all kinds of change, all invariants, harmless changes."""
    tally: Counter[tuple[str, str]] = Counter()
    for seed in range(NUM_SEEDS):
        rng = Random(seed)
        size = Size(nodes=3, actors=2) if seed % 3 else Size(nodes=4, actors=3, depth=3)
        plan = sound_plan(rng, size)
        assert check_verdict(plan) == "ok", f"seed {seed}"
        tally["unchanged", "ok"] += 1
        for kind, changed in changed_plans(rng, plan):
            tally[kind, check_verdict(changed)] += 1
    refusals: Counter[str] = Counter()
    harmless: Counter[str] = Counter()
    invariants: Counter[str] = Counter()
    for (kind, invariant), number in tally.items():
        (harmless if invariant == "ok" else refusals)[kind] += number
        invariants[invariant] += number
    assert tally.total() > 3.75 * NUM_SEEDS
    assert all(80 * refusals[kind] >= NUM_SEEDS for kind in MUTATIONS), refusals
    assert min(refusals.total(), harmless.total()) > 1.25 * NUM_SEEDS
    assert 2 * sum(number for kind, number in harmless.items() if kind != "unchanged") > NUM_SEEDS
    assert all(16 * invariants[f"PL-{number}"] > NUM_SEEDS for number in (1, 2, 3, 4)), invariants
    assert 40 * min(refusals["on main, further ahead"], harmless["on main, further ahead"]) > NUM_SEEDS


@given(st.integers(0, 2**32), st.lists(st.sampled_from(sorted(MUTATIONS)), max_size=3))
def test_the_verdict_after_several_changes(seed: int, kinds: list[str]) -> None:
    rng = Random(seed)
    plan = sound_plan(rng, Size(nodes=3, actors=2))
    for kind in kinds:
        plan = mutated(plan, kind, rng) or plan
    if any(plan.programs.values()):
        check_verdict(plan)


@pytest.mark.soak
def test_pl2_sound_plans_do_not_stop_where_methods_fail_without_waiting_for_all_inputs() -> None:
    """In every order, with methods that fail. And it means something: some plans stop if what was not waited for is left."""
    verdicts: Counter[str] = Counter()
    for seed in range(NUM_FAILING_SEEDS):
        rng = Random(seed)
        plan = sound_plan(rng, Size(nodes=4, actors=3, inputs_per_node=3, collectives=1))
        failing = [node.id for node in plan.nodes if rng.random() < 0.4]
        if not may_pass(plan, failing):
            continue
        try:
            explored = explore(plan, MOST_STATES, failing)
        except OverflowError:
            verdicts["too large"] += 1
            continue
        assert explored.verdict == "ok", f"seed {seed}, {failing}: {explored}\n{plan}"
        verdicts[explore(plan, MOST_STATES, failing, drops=False).verdict] += 1
    assert verdicts["deadlock"] + verdicts["ok"] > NUM_FAILING_SEEDS / 30, verdicts
    assert verdicts["deadlock"] > NUM_FAILING_SEEDS / 150, verdicts
    assert verdicts["too large"] < NUM_FAILING_SEEDS / 100, verdicts
    assert set(verdicts) <= {"deadlock", "ok", "too large"}


def test_the_machine_sees_each_kind_of_failure() -> None:
    """The machine is no better than its own tests: what it calls each failure, on plans where that is plain."""
    assert explore(edited(CHAIN, ("| send n0 @send ", ""))).verdict == "deadlock"
    assert explore(edited(CHAIN, ("| free n0", ""))).verdict == "deadlock"
    assert explore(edited(CHAIN, ("read i0 | run n0", "run n0 | read i0"))).verdict == "bad-use"
    in_other_order = ("recv n0 @recv | recv n1 @recv", "recv n1 @recv | recv n0 @recv")
    assert explore(edited(QUEUE, in_other_order)).verdict == "mismatch"
    assert explore(edited(CHAIN, ("write i0", "write i0 | write i0"))).verdict == "overwrite"
    assert explore(edited(CHAIN, ("read i0", "read i0 | free i0 | read i0"))).verdict != "ok"


def test_the_machine_tries_all_orders() -> None:
    """Two parties with nothing in common, a and b steps long: (a + 1) (b + 1) states."""
    plan = parse_plan(
        "plan max_inflight=1 returns=list\n"
        "node n0 = A.make() -> n0\nnode n1 = C.make() -> n1\n"
        "channel n0: A -> B | shm depth=1 buffer_bytes=0\nchannel n1: C -> D | shm depth=1 buffer_bytes=0\n"
        "A | run n0 | write n0\nB | read n0 | free n0\nC | run n1 | write n1\nD | read n1 | free n1\n"
    )
    num_rounds, steps_per_round = 3, 3
    assert explore(plan).num_states == (num_rounds * steps_per_round + 1) ** 2


# Growth


def num_lines_run(plan: Plan) -> int:
    """How many lines of this library ``find_fault`` executes."""
    count = 0

    def trace(frame: FrameType, event: str, _arg: Any) -> Any:
        nonlocal count
        if "crossfade" not in frame.f_code.co_filename:
            return None
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        fault = find_fault(plan)
    finally:
        sys.settrace(before)
    assert fault is None
    return count


@pytest.mark.soak
@pytest.mark.parametrize(("num_actors", "transport"), [(4, Transport.SHM), (4, Transport.GLOO), (200, Transport.GLOO)])
def test_the_work_is_linear_in_the_number_of_nodes(num_actors: int, transport: Transport) -> None:
    """With ten times as many nodes it is ten times as much, and little more."""
    num_nodes = num(400, 1_000)
    small, big = (num_lines_run(chain_plan(n, num_actors, transport)) for n in (num_nodes, 10 * num_nodes))
    assert small > 1_000
    assert big <= 12 * small
