"""The validator on PL-2: who waits for whom, in circles and in none; receives that run ahead; rings and their slots."""

from __future__ import annotations

from dataclasses import replace

import pytest

from crossfade.errors import PlanError
from crossfade.plan.parse import parse_plan
from crossfade.plan.validate import Fault, find_fault, validate
from tests.helpers.edited_plans import CHAIN, PAIR, QUEUE, TOGETHER, edited, verdict


def test_pl2_executions_may_begin() -> None:
    with pytest.raises(PlanError, match="max_inflight is 0, so no execution may begin"):
        validate(replace(parse_plan(CHAIN), max_inflight=0))


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
        CHAIN, ("gloo depth=2", f"gloo depth={depth}"), ("recv n0 @recv | run n1 | write n1 | free n0", steps)
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
