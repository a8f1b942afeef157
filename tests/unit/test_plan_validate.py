"""The validator: each invariant by number, and its verdict against that of an exhaustive search of interleavings."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from random import Random
from types import FrameType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crossfade.errors import PlanError
from crossfade.plan.parse import parse_plan
from crossfade.plan.plan import Plan
from crossfade.plan.validate import Fault, find_fault, validate
from crossfade.types import Transport
from tests.helpers.explore import explore
from tests.helpers.plans import MUTATIONS, Size, chain_plan, mutated, sound_plan

CHAIN = """
plan max_inflight=2 returns=value
input i0 = *
node n0 = A.make(i0) -> n0
node n1 = B.take(n0) -> n1
channel i0: driver -> A | shm depth=2 buffer_bytes=0
channel n0: A -> B | gloo depth=2 buffer_bytes=0
channel n1: B -> driver | shm depth=2 buffer_bytes=0
output n1
driver | write i0 | read n1 | free n1
A | read i0 | run n0 | send n0 @send | free i0
B | recv n0 @recv | run n1 | write n1 | free n0
"""

PAIR = """
plan max_inflight=2 returns=list
node n0 = A.make() -> n0
node n1 = B.make() -> n1
node n2 = A.take(n1) -> n2
node n3 = B.take(n0) -> n3
channel n0: A -> B | shm depth=2 buffer_bytes=0
channel n1: B -> A | shm depth=2 buffer_bytes=0
channel n2: A -> driver | shm depth=1 buffer_bytes=0
channel n3: B -> driver | shm depth=1 buffer_bytes=0
output n2
output n3
driver | read n2 | free n2 | read n3 | free n3
A | run n0 | write n0 | read n1 | run n2 | free n1 | write n2
B | run n1 | write n1 | read n0 | run n3 | free n0 | write n3
"""

QUEUE = """
plan max_inflight=2 returns=value
node n0 = A.make() -> n0
node n1 = A.make() -> n1
node n2 = B.take(n0, n1) -> n2
channel n0: A -> B | gloo depth=2 buffer_bytes=0
channel n1: A -> B | gloo depth=2 buffer_bytes=0
channel n2: B -> driver | shm depth=1 buffer_bytes=0
output n2
driver | read n2 | free n2
A | run n0 | send n0 @send | run n1 | send n1 @send
B | recv n0 @recv | recv n1 @recv | run n2 | free n0 | free n1 | write n2
"""


TOGETHER = """
plan max_inflight=2 returns=list
input i0 = *
node n0 = A.make(i0) -> n0
node n1 = B.make(i0) -> n1
node n2 = A.work(i0) -> n2
collective c0 = allreduce(sum) over gloo: A(n0) -> c0.0; B(n1) -> c0.1
collective c1 = allgather() over gloo: B(n1) -> c1.0; A(n0) -> c1.1
channel i0: driver -> A, B | shm depth=2 buffer_bytes=0
channel c0.0: A -> driver | shm depth=2 buffer_bytes=0
channel c1.0: B -> driver | shm depth=2 buffer_bytes=0
output c0.0
output c1.0
driver | write i0 | read c0.0 | free c0.0 | read c1.0 | free c1.0
A | read i0 | run n0 | coll c0 @coll | run n2 | free i0 | write c0.0 | coll c1
B | read i0 | run n1 | free i0 | coll c0 | coll c1 @coll | free n1 | write c1.0
"""


def edited(text: str, *edits: tuple[str, str]) -> Plan:
    for old, new in edits:
        assert text.count(old) == 1, f"{old!r} is there {text.count(old)} times"
        text = text.replace(old, new)
    return parse_plan(text)


def verdict(plan: Plan) -> tuple[str, str] | None:
    """(invariant, 'actor: step') of the fault, or None; what the machine does must agree."""
    fault = find_fault(plan)
    explored = explore(plan)
    assert (fault is None) == (explored.verdict == "ok"), f"{fault} but {explored}"
    if fault is None:
        return None
    assert fault.index is not None
    return fault.invariant, f"{fault.actor}: {plan.programs[fault.actor][fault.index]}"


@pytest.mark.parametrize("text", [CHAIN, PAIR, QUEUE, TOGETHER])
def test_sound_plans_pass(text: str) -> None:
    assert verdict(parse_plan(text)) is None
    validate(parse_plan(text))


@pytest.mark.parametrize(
    ("old", "new", "step"),
    [
        ("| write i0 ", "", "A: read i0"),
        ("| read i0 ", "| ", "driver: write i0"),
        ("| send n0 @send ", "", "B: recv n0 @recv"),
        ("| recv n0 @recv ", "", "A: send n0 @send"),
        ("write i0", "write i0 | write i0", "driver: write i0"),
        ("read n1", "read n1 | read n1", "driver: read n1"),
        ("read i0", "write i0", "A: write i0"),
        ("write i0", "write i0 | read i0", "driver: read i0"),
        ("send n0 @send", "write n0", "A: write n0"),
        ("recv n0 @recv", "read n0", "B: read n0"),
        ("run n0", "run n0 +1", "A: run n0 +1"),
        ("run n0", "run n0 @send", "A: run n0 @send"),
        ("write n1", "write n1 @send", "B: write n1 @send"),
        ("recv n0 @recv", "recv n0 @recv +-1", "B: recv n0 @recv +-1"),
        ("output n1", "output n0", "A: run n0"),
        ("output n1", "output i0", "driver: write i0"),
        ("A -> B", "A -> B, driver", "A: send n0 @send"),
    ],
)
def test_pl1_each_channel_has_one_write_and_one_read_per_reader(old: str, new: str, step: str) -> None:
    assert verdict(edited(CHAIN, (old, new))) == ("PL-1", step)


@pytest.mark.parametrize("ends", ["A -> B, B", "B -> B", "A -> B, A"])
def test_pl1_the_ends_of_a_channel_are_different_parties(ends: str) -> None:
    fault = find_fault(edited(CHAIN, ("A -> B", ends)))
    assert fault is not None
    assert fault.invariant == "PL-1"


def test_pl2_executions_may_begin() -> None:
    with pytest.raises(PlanError, match="max_inflight is 0, so no execution may begin"):
        validate(replace(parse_plan(CHAIN), max_inflight=0))


def test_pl1_receives_have_the_order_of_sends() -> None:
    swapped = ("recv n0 @recv | recv n1 @recv", "recv n1 @recv | recv n0 @recv")
    assert verdict(edited(QUEUE, swapped)) == ("PL-1", "B: recv n1 @recv")


def test_pl1_the_order_counts_executions() -> None:
    """What a receive runs ahead moves it past those of earlier executions."""
    n0, n1 = "recv n0 @recv |", "recv n1 @recv |"
    assert verdict(edited(QUEUE, (n1, "recv n1 @recv +1 |"))) == ("PL-1", "B: recv n1 @recv +1")
    assert verdict(edited(QUEUE, (n0, "recv n0 @recv +1 |"))) == ("PL-1", "B: recv n0 @recv +1")
    assert verdict(edited(QUEUE, (n0, ""), (n1, "recv n1 @recv | recv n0 @recv +1 |"))) is None
    assert verdict(edited(QUEUE, (n0, "recv n0 @recv +1 |"), (n1, "recv n1 @recv +1 |"))) is None


def test_pl1_queues_of_different_pairs_are_independent() -> None:
    two_readers = edited(
        QUEUE,
        ("channel n1: A -> B", "channel n1: A -> driver"),
        ("n2 = B.take(n0, n1)", "n2 = B.take(n0)"),
        ("recv n1 @recv | run n2 | free n0 | free n1", "run n2 | free n0"),
        ("driver | read", "driver | recv n1 @recv | free n1 | read"),
    )
    assert verdict(two_readers) is None


@pytest.mark.parametrize(
    ("old", "new", "step"),
    [
        ("| coll c0 | ", "| ", "A: coll c0 @coll"),
        ("coll c0 @coll | run n2", "coll c0 @coll | coll c0 | run n2", "A: coll c0"),
        ("coll c0 @coll", "coll c0 @coll +1", "A: coll c0 @coll +1"),
        ("driver | write i0", "driver | write i0 | coll c0", "driver: coll c0"),
        ("A(n0) -> c0.0; B(n1) -> c0.1", "A(n0) -> c0.0", "B: coll c0"),
        ("B(n1) -> c0.1", "B(n1) ->", "A: coll c0 @coll"),
        ("B(n1) -> c1.0;", "A(n0) -> c1.0;", "B: coll c1 @coll"),
    ],
)
def test_pl1_each_party_does_a_collective_once(old: str, new: str, step: str) -> None:
    assert verdict(edited(TOGETHER, (old, new))) == ("PL-1", step)


def test_pl1_collectives_of_the_same_parties_have_one_order() -> None:
    swapped = edited(TOGETHER, ("coll c0 | coll c1 @coll", "coll c1 @coll | coll c0"))
    assert verdict(swapped) == ("PL-1", "B: coll c1 @coll")


def test_pl2_a_collective_ends_when_all_have_started_it() -> None:
    """B asks for c0.0 before it takes part: where A gives c0.0 away at the end, nobody goes on."""
    asks = [
        ("node n1 = B.make(i0)", "node n1 = B.make(n2)"),
        ("channel c0.0", "channel n2: A -> B | shm depth=1 buffer_bytes=0\nchannel c0.0"),
        ("channel i0: driver -> A, B", "channel i0: driver -> A"),
        ("B | read i0 | run n1 | free i0", "B | read n2 | run n1 | free n2"),
    ]
    started = edited(TOGETHER, *asks, ("run n2 | free i0", "run n2 | write n2 | free i0"))
    assert verdict(started) is None
    on_main = edited(TOGETHER, *asks, ("coll c0 @coll | run n2 | free i0", "coll c0 | run n2 | write n2 | free i0"))
    assert verdict(on_main) in {("PL-2", "A: coll c0"), ("PL-2", "B: read n2")}
    used_first = edited(TOGETHER, *asks, ("run n2 | free i0 | write c0.0", "write c0.0 | run n2 | write n2 | free i0"))
    assert verdict(used_first) is not None


def test_pl2_arrivals_at_a_party_come_one_after_another() -> None:
    """B starts to receive from C before it starts to receive from A; A's value makes C's."""
    text = """
plan max_inflight=2 returns=value
node n0 = A.make() -> n0
node n1 = B.step(n0) -> n1
node n2 = C.step(n1) -> n2
node n3 = B.step(n2) -> n3
channel n0: A -> B | gloo depth=2 buffer_bytes=0
channel n1: B -> C | shm depth=2 buffer_bytes=0
channel n2: C -> B | gloo depth=2 buffer_bytes=0
channel n3: B -> driver | shm depth=1 buffer_bytes=0
output n3
driver | read n3 | free n3
A | run n0 | send n0 @send
B | recv n0 @recv | recv n2 @recv | run n1 | free n0 | write n1 | run n3 | free n2 | write n3
C | read n1 | run n2 | free n1 | send n2 @send
"""
    assert verdict(parse_plan(text)) is None
    found = verdict(edited(text, ("recv n0 @recv | recv n2 @recv", "recv n2 @recv | recv n0 @recv")))
    assert found is not None
    assert found[0] == "PL-2"


def test_pl3_who_starts_a_collective_waits_for_it_in_the_same_round() -> None:
    without = edited(
        TOGETHER,
        ("channel c1.0: B -> driver | shm depth=2 buffer_bytes=0\n", ""),
        ("output c1.0\n", ""),
        (" | read c1.0 | free c1.0", ""),
        (" | write c1.0", ""),
    )
    assert verdict(without) == ("PL-3", "B: coll c1 @coll")
    assert verdict(edited(str(without), ("coll c1 @coll", "coll c1"))) is None


@pytest.mark.parametrize(
    ("old", "new", "step"),
    [
        ("| run n1 | free i0 | coll c0 |", "| coll c0 | run n1 | free i0 |", "B: coll c0"),
        ("write c0.0 | coll c1", "coll c1 | write c0.0 | coll c7", "A: coll c7"),
        ("run n0 | coll c0 @coll | run n2", "run n0 | write c0.0 | run n2 | coll c0 @coll", "A: write c0.0"),
    ],
)
def test_pl4_collectives_take_what_is_there(old: str, new: str, step: str) -> None:
    plan = (
        edited(TOGETHER, (old, new))
        if "write c0.0 | run" not in new
        else edited(TOGETHER, ("| free i0 | write c0.0 |", "| free i0 |"), (old, new))
    )
    assert verdict(plan) == ("PL-4", step)


def test_pl2_crossed_reads() -> None:
    """Each of two actors reads before it writes what the other reads."""
    plan = edited(
        PAIR,
        ("run n0 | write n0 | read n1", "run n0 | read n1 | write n0"),
        ("run n1 | write n1 | read n0", "run n1 | read n0 | write n1"),
    )
    fault = find_fault(plan)
    assert fault is not None
    assert verdict(plan) in {("PL-2", "A: read n1"), ("PL-2", "B: read n0")}
    assert {"A 'read n1'", "B 'write n1'", "B 'read n0'", "A 'write n0'"} == set(cycle_of(fault))


def cycle_of(fault: Fault) -> list[str]:
    return fault.reason.split(": ", 1)[1].split("; ")


def test_pl2_one_crossed_read_is_no_cycle() -> None:
    assert verdict(edited(PAIR, ("run n0 | write n0 | read n1", "run n0 | read n1 | write n0"))) is None


def test_pl2_rendezvous() -> None:
    """Sends on main wait for receives: if both actors send first, neither ever receives."""
    gloo = [(f"{ends} | shm", f"{ends} | gloo") for ends in ("A -> B", "B -> A")]
    on_main = [("write n0 | read n1", "send n0 | recv n1"), ("write n1 | read n0", "send n1 | recv n0")]
    assert verdict(edited(PAIR, *gloo, *on_main)) in {("PL-2", "A: send n0"), ("PL-2", "B: send n1")}
    one_trails = [on_main[0], ("write n1 | read n0", "send n1 @send | recv n0")]
    assert verdict(edited(PAIR, *gloo, *one_trails)) is None
    one_is_hoisted = [on_main[0], ("run n1 | write n1 | read n0", "recv n0 @recv | run n1 | send n1")]
    assert verdict(edited(PAIR, *gloo, *one_is_hoisted)) is None


@pytest.mark.parametrize(
    ("depth", "ahead", "place", "is_sound"),
    [
        (1, 0, "first", True),
        (1, 1, "first", False),
        (1, 1, "last", True),
        (2, 1, "first", True),
        (2, 2, "first", False),
        (2, 2, "last", True),
        (2, 3, "first", False),
        (2, 3, "last", False),
        (3, 2, "first", True),
    ],
)
def test_pl2_a_receive_runs_no_further_ahead_than_its_ring_is_deep(
    depth: int, ahead: int, place: str, is_sound: bool
) -> None:
    step = f"recv n0 @recv +{ahead}"
    steps = f"{step} | run n1 | write n1 | free n0" if place == "first" else f"run n1 | write n1 | free n0 | {step}"
    plan = edited(
        CHAIN,
        ("gloo depth=2", f"gloo depth={depth}"),
        ("recv n0 @recv | run n1 | write n1 | free n0", steps),
    )
    found = verdict(plan)
    assert (found is None) == is_sound
    assert found is None or found[0] == "PL-2"


def test_pl2_a_receive_ahead_on_main_waits_for_a_later_round() -> None:
    """It is sound only where the writer can be a round ahead of the reader."""
    ahead = ("recv n0 @recv | run n1 | write n1 | free n0", "run n1 | write n1 | free n0 | recv n0 +1")
    before = ("recv n0 @recv | run n1 | write n1 | free n0", "recv n0 +1 | run n1 | write n1 | free n0")
    assert verdict(edited(CHAIN, ahead)) is None
    assert verdict(edited(CHAIN, before)) is not None
    free_running = [("make(i0)", "make()"), ("write i0 |", ""), ("read i0 | run n0", "run n0"), ("| free i0", "")]
    no_input = ("channel i0: driver -> A | shm depth=2 buffer_bytes=0\n", "")
    assert verdict(edited(CHAIN, before, *free_running, no_input)) is None


@pytest.mark.parametrize(("depth", "is_sound"), [(1, False), (2, True)])
def test_pl2_a_receive_ahead_on_main_counts_on_slots(depth: int, is_sound: bool) -> None:
    """While B waits for the send of the next round, A waits for B to free the value that was written in this one."""
    plan = edited(
        QUEUE,
        ("A -> B | gloo depth=2 buffer_bytes=0\nchannel n1: A -> B | gloo depth=2", f"A -> B | shm depth={depth}"),
        ("channel n2:", "channel n1: A -> B | gloo depth=2 buffer_bytes=0\nchannel n2:"),
        ("send n0 @send", "write n0"),
        ("recv n0 @recv | recv n1 @recv", "recv n1 +1 | read n0"),
    )
    found = verdict(plan)
    assert (found is None) == is_sound
    assert found is None or found[0] == "PL-2"


@pytest.mark.parametrize("depth", [0, -1])
def test_pl2_a_ring_has_slots(depth: int) -> None:
    assert verdict(edited(CHAIN, ("gloo depth=2", f"gloo depth={depth}"))) == ("PL-2", "A: send n0 @send")


@pytest.mark.parametrize(
    ("value", "step"), [("n0", "B: recv n0 @recv"), ("i0", "A: read i0"), ("n1", "driver: read n1")]
)
def test_pl3_what_is_read_is_freed(value: str, step: str) -> None:
    assert verdict(edited(CHAIN, (f" | free {value}", ""))) == ("PL-3", step)


@pytest.mark.parametrize(
    ("old", "new", "step"),
    [
        ("read i0 | run n0", "run n0 | read i0", "A: run n0"),
        ("run n0 | send n0 @send", "send n0 @send | run n0", "A: send n0 @send"),
        ("run n1 | write n1 | free n0", "free n0 | run n1 | write n1", "B: run n1"),
        ("write n1 | free n0", "write n1 | free n0 | free n0", "B: free n0"),
        ("run n0 | send", "run n0 | free n0 | send", "A: send n0 @send"),
        ("run n0 |", "run n0 | run n0 |", "A: run n0"),
        ("read i0 | run n0", "read i0 | run n1", "A: run n1"),
        ("run n0 |", "run n7 |", "A: run n7"),
        ("write n1", "write n7", "B: write n7"),
        ("free n0", "free n7", "B: free n7"),
        ("run n1 |", "", "B: write n1"),
        ("write i0", "free i0 | write i0", "driver: write i0"),
        ("make(i0)", "make(i7)", "A: run n0"),
        ("-> n1", "-> n1, n0", "A: run n0"),
        ("input i0 = *", "input i0 = *\ninput n1 = go", "B: run n1"),
    ],
)
def test_pl4_values_are_there_when_they_are_used(old: str, new: str, step: str) -> None:
    assert verdict(edited(CHAIN, (old, new))) == ("PL-4", step)


def test_pl4_a_party_gets_a_value_once() -> None:
    """Neither through two channels, nor through one where it has made the value itself."""
    twice = edited(
        CHAIN,
        ("output n1", "channel n0~shm of n0: A -> B | shm depth=2 buffer_bytes=0\noutput n1"),
        ("send n0 @send", "send n0 @send | write n0~shm"),
        ("recv n0 @recv", "recv n0 @recv | read n0~shm"),
    )
    assert verdict(twice) == ("PL-4", "B: read n0~shm")
    back = edited(
        CHAIN,
        ("output n1", "channel n0~back of n0: B -> A | shm depth=2 buffer_bytes=0\noutput n1"),
        ("free i0", "free i0 | read n0~back | free n0"),
        ("write n1", "write n1 | write n0~back"),
    )
    assert verdict(back) == ("PL-4", "A: read n0~back")


def test_a_value_may_be_passed_on() -> None:
    """A reader may write the value on to another reader."""
    plan = edited(
        CHAIN,
        ("output n1", "channel n0~on of n0: B -> driver | shm depth=2 buffer_bytes=0\noutput n1\noutput n0"),
        ("driver | write i0", "driver | write i0 | read n0~on | free n0"),
        ("recv n0 @recv", "recv n0 @recv | write n0~on"),
    )
    assert verdict(plan) is None


@pytest.mark.parametrize("start", ["input i0", "node n0", "channel n1"])
def test_pl4_ids_are_unique(start: str) -> None:
    line = next(line for line in CHAIN.splitlines(keepends=True) if line.startswith(start))
    fault = find_fault(edited(CHAIN, (line, line * 2)))
    assert fault is not None
    assert fault.invariant == "PL-4"
    assert fault.reason.startswith("two ")


def test_a_plan_without_steps_has_faults_without_a_step() -> None:
    empty = replace(parse_plan(CHAIN), programs={})
    assert find_fault(empty) == Fault("PL-4", "A", None, "node n0 is never run")
    with pytest.raises(PlanError, match=r"^PL-4: A: node n0 is never run\nhint: "):
        validate(empty)


def test_pl4_a_static_shape_of_a_value_that_nothing_makes() -> None:
    assert find_fault(replace(parse_plan(CHAIN), static=("i0", "n0"))) is None
    fault = find_fault(replace(parse_plan(CHAIN), static=("n0", "n99")))
    assert fault is not None
    assert (fault.invariant, fault.reason) == ("PL-4", "n99 is said to have a static shape, and nothing makes it")


@pytest.mark.parametrize("num_nodes", [3, 900])
def test_the_error_shows_the_step(num_nodes: int) -> None:
    plan = chain_plan(num_nodes, 3)
    place = 3 * (num_nodes // 9) + 1
    steps = list(plan.programs["A1"])
    step = steps.pop(place - place % 4)
    with pytest.raises(PlanError) as caught:
        validate(replace(plan, programs={**plan.programs, "A1": tuple(steps)}))
    message = str(caught.value)
    lines = message.splitlines()
    arrow = next(i for i, line in enumerate(lines) if line.endswith("^ <-- here"))
    pointed_at = lines[arrow - 1][lines[arrow].index("^") :].split(" |")[0].strip()
    assert message.startswith("PL-1: ")
    assert pointed_at == f"write {step.target}"
    assert f"{pointed_at!r}: A1 has no read of channel {step.target}" in lines[0]
    assert lines[-1].startswith("hint: ")
    assert len(message) < 3000


# The verdict against all interleavings

NUM_SEEDS = 320
CHANGES_PER_PLAN = 3
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


def test_pl1_to_pl4_the_verdict_is_that_of_all_interleavings() -> None:
    check_verdicts(NUM_SEEDS)


def check_verdicts(num_seeds: int) -> None:
    """On every plan. And the comparison means something: all kinds of change, all invariants, harmless changes."""
    tally: Counter[tuple[str, str]] = Counter()
    for seed in range(num_seeds):
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
    assert tally.total() > 3.75 * num_seeds
    assert all(80 * refusals[kind] >= num_seeds for kind in MUTATIONS), refusals
    assert min(refusals.total(), harmless.total()) > 1.25 * num_seeds
    assert 2 * sum(number for kind, number in harmless.items() if kind != "unchanged") > num_seeds
    assert all(16 * invariants[f"PL-{number}"] > num_seeds for number in (1, 2, 3, 4)), invariants
    assert 40 * min(refusals["on main, further ahead"], harmless["on main, further ahead"]) > num_seeds


@given(st.integers(0, 2**32), st.lists(st.sampled_from(sorted(MUTATIONS)), max_size=3))
def test_the_verdict_after_several_changes(seed: int, kinds: list[str]) -> None:
    rng = Random(seed)
    plan = sound_plan(rng, Size(nodes=3, actors=2))
    for kind in kinds:
        plan = mutated(plan, kind, rng) or plan
    if any(plan.programs.values()):
        check_verdict(plan)


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


@pytest.mark.parametrize(("num_actors", "transport"), [(4, Transport.SHM), (4, Transport.GLOO), (200, Transport.GLOO)])
def test_the_work_is_linear_in_the_number_of_nodes(num_actors: int, transport: Transport) -> None:
    check_growth(num_actors, transport, 400)


def check_growth(num_actors: int, transport: Transport, num_nodes: int) -> None:
    """With ten times as many nodes it is ten times as much, and little more."""
    small, big = (num_lines_run(chain_plan(n, num_actors, transport)) for n in (num_nodes, 10 * num_nodes))
    assert small > 1_000
    assert big <= 12 * small
