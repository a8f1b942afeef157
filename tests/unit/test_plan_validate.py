"""The validator: each invariant by number, and what its errors show."""

from __future__ import annotations

from dataclasses import replace

import pytest

from crossfade.errors import PlanError
from crossfade.plan.parse import parse_plan
from crossfade.plan.validate import Fault, find_fault, validate
from tests.helpers.edited_plans import CHAIN, PAIR, QUEUE, TOGETHER, edited, verdict
from tests.helpers.plans import chain_plan


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
