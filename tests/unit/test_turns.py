"""Whose pushes come before whose, from the plan."""

from __future__ import annotations

from graphlib import TopologicalSorter

from hypothesis import given
from hypothesis import strategies as st

from crossfade.engines.board import peers_of
from crossfade.graph.nodes import InputNode, MultiOutputNode
from crossfade.plan.actions import Verb
from crossfade.plan.plan import Plan
from crossfade.plan.text import values_used
from crossfade.plan.turns import predecessors, targets, turn_peers
from crossfade.types import DRIVER, Transport
from tests.helpers.small_graphs import actor, call, compiled, gpu_graphs


def test_each_channel_comes_after_the_last_of_another_writer() -> None:
    """R uses a0 of A, then a1 of A, b of B, a2 of A; what one writer pushes is in order already."""
    a, b, r = actor("A", 0), actor("B", 1), actor("R", 2)
    inp = InputNode()
    values = [call(a, "make", inp), call(a, "make", inp), call(b, "make", inp), call(a, "make", inp)]
    plan = compiled(call(r, "take", *values))
    names = [channel.id for channel in sorted(plan.channels, key=lambda each: each.turn) if channel.writer in "AB"]
    a0, a1, third, a2 = names
    assert predecessors(plan) == {(third, "R"): a1, (a2, "R"): third}
    assert a0 not in {channel for channel, _ in predecessors(plan)}
    assert peers_of(plan, "A") == {DRIVER, "B", "R"}
    assert peers_of(plan, "B") == {DRIVER, "A", "R"}
    assert turn_peers(plan, "R", predecessors(plan)) == set()


def test_only_copies_to_one_reader_that_take_its_link_have_turns() -> None:
    inp = InputNode()
    made = [call(actor(f"S{i}", i), "make", inp) for i in range(3)]
    apart = compiled(MultiOutputNode([call(actor(f"R{i}", 3 + i), "take", value) for i, value in enumerate(made)]))
    assert predecessors(apart) == {}
    near = compiled(call(actor("R", 1), "take", *made))  # S1 is on the GPU of R
    assert predecessors(near) == {("n2", "R"): "n0"}
    staged = compiled(call(actor("R", 3), "take", *[value.with_tensor_transport("staged") for value in made]))
    assert predecessors(staged) == {}
    again = InputNode()
    one = compiled(
        call(actor("R", 3), "take", call(actor("S0", 0), "make", again), call(actor("S0", 0), "make", again))
    )
    assert predecessors(one) == {}


def test_a_value_that_is_only_written_after_this_one_is_passed_over() -> None:
    """A writes y for R, then x for B, of which B makes what R uses before y. C's value, used first of all, depends on neither."""
    a, b, c, r = actor("A", 0), actor("B", 1), actor("C", 2), actor("R", 3)
    inp = InputNode()
    first, y, x = call(c, "make", inp), call(a, "make", inp), call(a, "make", inp)
    plan = compiled(call(r, "take", first, call(b, "make", x), y))
    (y_channel,) = (each for each in plan.channels if each.writer == "A" and each.readers == ("R",))
    z_channel = next(each for each in plan.channels if each.writer == "B")
    c_channel = next(each for each in plan.channels if each.writer == "C")
    assert predecessors(plan) == {(z_channel.id, "R"): c_channel.id, (y_channel.id, "R"): c_channel.id}


def test_lanes_lead_to_the_gpu_of_the_same_position_or_to_the_first() -> None:
    inp = InputNode()
    plan = compiled(
        call(actor("R", 4, 5), "take", call(actor("A", 0, 1), "make", inp), call(actor("B", 2), "make", inp))
    )
    assert targets(plan, "A", "R") == (0, 1)
    assert targets(plan, "B", "R") == (0,)
    assert targets(plan, "R", "B") == (0, 0)
    assert targets(plan, "X", "Y") == (0,)


def later(plan: Plan, channel: str) -> set[str]:
    """Channels that are written after this one in each execution: what can be reached from its write, step by step."""
    steps = {(party, index): action for party, actions in plan.programs.items() for index, action in enumerate(actions)}
    puts = {action.target: step for step, action in steps.items() if action.verb in (Verb.WRITE, Verb.SEND)}
    front: list[tuple[str, int]] = [puts[channel]]
    found: set[tuple[str, int]] = set()
    while front:
        party, index = front.pop()
        action = steps[party, index]
        after = [(party, index + 1)] if (party, index + 1) in steps else []
        if action.verb in (Verb.WRITE, Verb.SEND):
            put = plan.channel[action.target]
            after += [
                step
                for step, other in steps.items()
                if step[0] in put.readers
                and (
                    put.value in values_used(plan, other, step[0])
                    if put.is_ordered
                    else (other.verb is Verb.READ and other.target == put.id)
                )
            ]
        new = set(after) - found
        found |= new
        front += new
    return {steps[step].target for step in found if steps[step].verb is Verb.WRITE}


@given(output=gpu_graphs(), overlap=st.booleans())
def test_predecessors_are_used_before_at_the_same_reader_and_never_go_in_a_circle(
    output: MultiOutputNode, overlap: bool
) -> None:
    plan = compiled(output, overlap=overlap)
    before = predecessors(plan)
    order: TopologicalSorter[str] = TopologicalSorter()
    for (name, reader), other in before.items():
        channel, predecessor = plan.channel[name], plan.channel[other]
        assert channel.transport is predecessor.transport is Transport.COPY
        assert reader in channel.readers
        assert reader in predecessor.readers
        assert channel.writer != predecessor.writer
        assert predecessor.turn <= channel.turn
        assert other not in later(plan, name)
        assert predecessor.writer in peers_of(plan, channel.writer)
        assert channel.writer in peers_of(plan, predecessor.writer)
        order.add(name, other)
    order.prepare()
