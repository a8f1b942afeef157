"""The simulator against times derived by hand."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from crossfade.errors import PlanError
from crossfade.plan.plan import Plan
from crossfade.schedule.cost import CostModel, Slowdown
from crossfade.schedule.simulate import Simulation, simulate
from crossfade.schedule.workload import Workload
from tests.helpers.edited_plans import actions, chain, fan_in, plan, side_by_side, two_sends
from tests.helpers.small_graphs import ROUND, only, times

COSTS = replace(ROUND, wake_us=35.0, latency_us=2.0, gbs=1.0, host_us_per_mb=0.0)
"""Round figures; nobody sleeps, and there is a core for everyone. 98,000 bytes take gloo 100 us."""


CHAIN_WORK = Workload({"f": 10.0, "g": 20.0})
CHAIN_US = 35.25
"""write 1, hop 0.25, read 0.5, f 10, write 1, hop 0.25, read 0.5, g 20, write 1, hop 0.25, read 0.5."""


BLOCKING = fan_in("recv n0; run n3; free n0; recv n1; run n4; free n1; recv n2; run n5; free n2; write n5")
HOISTED = fan_in(
    "recv n0 @recv; recv n1 @recv; recv n2 @recv;run n3; free n0; run n4; free n1; run n5; free n2; write n5"
)
AHEAD = fan_in(
    "recv n0 @recv +1; recv n1 @recv +1; recv n2 @recv +1;run n3; free n0; run n4; free n1; run n5; free n2; write n5"
)
FAN_IN_WORK = Workload({"make": 10.0, "work": 50.0}, default_value_bytes=98_000)


def test_chain_of_two_takes_the_sum_of_its_steps() -> None:
    timeline = simulate(chain(), CHAIN_WORK, COSTS)
    assert timeline.name == "predicted"
    assert timeline.makespan_us == pytest.approx(CHAIN_US)
    assert times(only(timeline, "A", "run n0")) == (1.75, 11.75)
    assert times(only(timeline, "B", "read n0", "wait")) == (0.0, 13.0)
    assert times(only(timeline, "B", "read n0", "communicate")) == (13.0, 13.5)
    assert times(only(timeline, "B", "run n1")) == (13.5, 33.5)
    assert only(timeline, "B", "run n1").what == "g"
    assert only(timeline, "B", "read n0", "wait").what == "written n0"


def test_step_cost_and_cost_per_mb_are_added_to_every_action() -> None:
    costs = replace(COSTS, step_us=0.125, write_us_per_mb=30.0, read_us_per_mb=2.0)
    work = Workload(CHAIN_WORK.compute_us, {"n0": 2_000_000}, default_value_bytes=0)
    # Ten actions lie on the value's way, the two releases among them that A and B do before they write.
    assert simulate(chain(), work, costs).makespan_us == pytest.approx(CHAIN_US + 60 + 4 + 10 * 0.125)


def test_a_reader_that_waited_longer_than_it_spins_wakes_late() -> None:
    timeline = simulate(chain(), CHAIN_WORK, replace(COSTS, spin_us=5.0))
    # A saw its input after 1.25 us of polling; B and the driver had gone to sleep.
    assert times(only(timeline, "A", "run n0")) == (1.75, 11.75)
    assert times(only(timeline, "B", "read n0", "communicate")) == (48.0, 48.5)
    assert timeline.makespan_us == pytest.approx(CHAIN_US + 2 * 35.0)


def test_one_in_flight_repeats_the_latency() -> None:
    timeline = simulate(chain(), CHAIN_WORK, COSTS, num_executions=5, inflight=1)
    assert timeline.makespan_us == pytest.approx(5 * CHAIN_US)
    assert timeline.steady_us() == pytest.approx(CHAIN_US)


def test_many_in_flight_run_at_the_slowest_actor_s_pace() -> None:
    timeline = simulate(chain(), CHAIN_WORK, COSTS, num_executions=20)
    assert timeline.steady_us() == pytest.approx(0.5 + 20 + 1)
    assert timeline.makespan_us == pytest.approx(CHAIN_US + 19 * 21.5)


def test_pl3_a_ring_of_one_slot_makes_the_writer_wait_for_the_release() -> None:
    timeline = simulate(chain(depth=1), CHAIN_WORK, COSTS, num_executions=20)
    # From the release of n0 on: hop 0.25, write 1, hop 0.25, read 0.5, g 20.
    assert timeline.steady_us() == pytest.approx(22.0)
    blocked = only(timeline, "A", "write n0", "wait", execution=3)
    assert blocked.what == "freed n0 by B"
    released = only(timeline, "B", "run n1", execution=2).end_us
    assert blocked.end_us == pytest.approx(released + 0.25)


def test_the_driver_has_one_thread() -> None:
    costs = replace(COSTS, write_us=4.0, hop_us=0.0)
    timeline = simulate(chain(), Workload(), costs, num_executions=40)
    spans = sorted(
        (span.start_us, span.end_us) for span in timeline.spans if span.actor == "driver" and span.kind == "communicate"
    )
    assert all(start >= end - 1e-6 for (_, end), (start, _) in pairwise(spans))
    # Every party's share is a write and a read; the driver's are not beside each other either.
    assert timeline.steady_us() == pytest.approx(4.5)


def test_a_blocking_fan_in_transfers_and_computes_in_turn() -> None:
    timeline = simulate(BLOCKING, FAN_IN_WORK, COSTS)
    # Sends start at 1 + 0.25 + 0.5 + 10 + 1; each later receive starts when the work before it is done.
    assert times(only(timeline, "R", "run n3")) == (112.75, 162.75)
    assert times(only(timeline, "R", "run n4")) == (263.75, 313.75)
    assert times(only(timeline, "R", "run n5")) == (414.75, 464.75)
    assert timeline.makespan_us == pytest.approx(466.5)
    assert timeline.hidden_us("R") == pytest.approx(0.0)
    assert timeline.exposed_us("R") == pytest.approx(3 * (1 + 100) + 1)
    assert times(only(timeline, "R", "recv n1", "wait")) == (163.75, 263.75)


def test_hoisted_receives_bring_values_one_after_another_in_their_order() -> None:
    timeline = simulate(HOISTED, FAN_IN_WORK, COSTS)
    for number in range(3):
        start, end = 12.75 + 100 * number, 112.75 + 100 * number
        assert times(only(timeline, "R", f"recv n{number}", "communicate")) == (start, end)
        assert times(only(timeline, f"S{number}", f"send n{number}")) == (start, end)
    # The three values come back to back, and the last one is worked on: 50, write 1, hop 0.25, read 0.5.
    assert timeline.makespan_us == pytest.approx(312.75 + 51.75)
    waited = only(timeline, "R", "run n3", "wait")
    assert (*times(waited), waited.what) == (3.0, 112.75, "arrived n0 at R")


def test_a_value_that_is_late_holds_up_those_that_are_received_after_it() -> None:
    late = replace(FAN_IN_WORK, compute_us={"n0": 40.0, "make": 10.0, "work": 50.0})
    timeline = simulate(HOISTED, late, COSTS)
    assert times(only(timeline, "R", "recv n0", "communicate")) == (42.75, 142.75)
    assert times(only(timeline, "R", "recv n1", "communicate")) == (142.75, 242.75)


def test_a_sender_sends_to_several_receivers_at_once() -> None:
    forked = plan(
        {"n0": ("A.f", "i0"), "n1": ("B.g", "n0"), "n2": ("C.g", "n0")},
        {
            "i0": ("driver", "A", "shm", 1),
            "n0": ("A", "B C", "gloo", 1),
            "n1": ("B", "driver", "shm", 1),
            "n2": ("C", "driver", "shm", 1),
        },
        {
            "driver": "write i0; read n1; free n1; read n2; free n2",
            "A": "read i0; run n0; free i0; send n0 @send",
            "B": "recv n0; run n1; free n0; write n1",
            "C": "recv n0; run n2; free n0; write n2",
        },
        ("n1", "n2"),
    )
    timeline = simulate(forked, Workload({"f": 10.0}, default_value_bytes=98_000), COSTS)
    for reader in "BC":
        assert times(only(timeline, reader, "recv n0", "wait")) == (1.0, 112.75)
    assert [times(span) for span in timeline.spans if (span.actor, span.stream) == ("A", "send")] == [
        (12.75, 112.75),
        (12.75, 112.75),
    ]


@pytest.mark.parametrize(("num_cores", "transfer_us"), [(2, 100.0), (1, 196.0)])
def test_a_transfer_takes_a_core_of_the_sender_too(num_cores: int, transfer_us: float) -> None:
    """98,000 bytes: 100 us on the receiver's core, 980 us/MB are 96 us on the sender's."""
    costs = replace(COSTS, num_cores=num_cores, host_us_per_mb=96 / 0.098)
    timeline = simulate(two_sends("@send"), Workload({"g": 5.0}, default_value_bytes=98_000), costs)
    assert only(timeline, "B", "recv n1", "communicate").duration_us == pytest.approx(transfer_us)


def test_an_idle_core_takes_a_transfer_over_at_once_and_a_method_late() -> None:
    costs = replace(COSTS, num_cores=2, balance_us=1e9, host_us_per_mb=30 / 0.098)
    work = Workload({"n0": 10.0, "n1": 50.0, "g": 50.0}, default_value_bytes=98_000)
    timeline = simulate(two_sends("@send"), work, costs)
    # From 12.75 on: 100 us for B and n1's 50 us share a core, and A's 30 us have one. Then B's other 85 us go there.
    assert times(only(timeline, "B", "recv n0", "communicate")) == (12.75, 42.75 + 85)
    assert times(only(timeline, "A", "run n1")) == (12.75, 42.75 + 35)


def test_receives_that_run_ahead_hide_the_next_execution_s_transfer() -> None:
    work = replace(FAN_IN_WORK, default_value_bytes=38_000)  # 40 us a transfer
    timeline = simulate(AHEAD, work, COSTS, num_executions=2)
    # The first execution's values come back to back from 12.75 on, the second one's after them.
    assert times(only(timeline, "R", "recv n0", execution=1)) == (132.75, 172.75)
    assert times(only(timeline, "R", "run n3", "compute", execution=1)) == (203.75, 253.75)
    assert timeline.hidden_us("R") == pytest.approx(5 * 40 - 1)
    # 6 us of starting receives, the first transfer, and two writes of the output.
    assert timeline.exposed_us("R") == pytest.approx(6 + 40 + 2)
    hoisted = simulate(HOISTED, work, COSTS, num_executions=10)
    ahead = simulate(AHEAD, work, COSTS, num_executions=10)
    # The first transfer starts with the first of the three receives.
    assert hoisted.steady_us() == pytest.approx(1 + 40 + 150 + 1)
    assert ahead.steady_us() == pytest.approx(3 + 150 + 1)


def test_nothing_runs_ahead_past_the_last_execution() -> None:
    timeline = simulate(AHEAD, FAN_IN_WORK, COSTS, num_executions=3)
    assert {span.execution for span in timeline.spans} == {0, 1, 2}


def test_a_trailing_send_hides_behind_the_next_method_and_a_blocking_one_does_not() -> None:
    work = Workload({"f": 10.0, "g": 50.0}, default_value_bytes=98_000)
    trailing = simulate(two_sends("@send"), work, COSTS)
    assert times(only(trailing, "A", "run n1")) == (12.75, 22.75)
    assert times(only(trailing, "B", "recv n0", "communicate")) == (12.75, 112.75)
    # One after the other between the same two actors.
    assert times(only(trailing, "B", "recv n1", "communicate")) == (112.75, 212.75)
    assert trailing.hidden_us("A") == pytest.approx(10.0)
    blocking = simulate(two_sends(""), work, COSTS)
    assert times(only(blocking, "A", "send n0", "wait")) == (12.75, 112.75)
    assert times(only(blocking, "A", "run n1")) == (112.75, 122.75)
    assert times(only(blocking, "B", "recv n1", "communicate")) == (123.75, 223.75)
    assert blocking.hidden_us("A") == 0.0


def test_computation_and_transfers_slow_each_other_down() -> None:
    costs = replace(COSTS, slowdown=Slowdown(compute=1.5, transfer=2.0))
    timeline = simulate(two_sends("@send"), Workload({"f": 10.0, "g": 50.0}, default_value_bytes=98_000), costs)
    # n0 travels from 12.75 on; f beside it takes 15, in which 7.5 us of the transfer are done.
    assert times(only(timeline, "A", "run n0")) == (1.75, 11.75)
    assert times(only(timeline, "A", "run n1")) == (12.75, 27.75)
    assert times(only(timeline, "B", "recv n0", "communicate")) == (12.75, 27.75 + 92.5)


def test_a_method_is_slowed_down_no_longer_than_the_transfer_takes() -> None:
    costs = replace(COSTS, slowdown=Slowdown(compute=1.5, transfer=2.0))
    work = Workload({"n0": 10.0, "n1": 200.0, "g": 50.0}, default_value_bytes=98_000)
    timeline = simulate(two_sends("@send"), work, costs)
    # The whole transfer lies beside the method, and a third of the method is left after it.
    assert times(only(timeline, "B", "recv n0", "communicate")) == (12.75, 212.75)
    assert times(only(timeline, "A", "run n1")) == (12.75, round(212.75 + 200 / 3, 6))


@pytest.mark.parametrize(("num_actors", "num_cores", "f_us"), [(4, 4, 10.0), (4, 2, 20.0), (3, 2, 15.0), (2, 1, 20.0)])
def test_methods_share_the_cores(num_actors: int, num_cores: int, f_us: float) -> None:
    free = replace(COSTS, write_us=0.0, read_us=0.0, hop_us=0.0, num_cores=num_cores)
    timeline = simulate(side_by_side(num_actors), Workload({"f": 10.0}), free)
    assert timeline.makespan_us == pytest.approx(f_us)


def test_a_background_transfer_takes_a_share_of_the_cores() -> None:
    work = Workload({"f": 10.0, "g": 50.0}, default_value_bytes=98_000)
    timeline = simulate(two_sends("@send"), work, replace(COSTS, num_cores=1))
    # B's second receive has 0.25 us of work left when the first f starts; the second f runs beside the transfer.
    assert times(only(timeline, "A", "run n0")) == (3.25, 13.5)
    assert only(timeline, "A", "run n1").duration_us == pytest.approx(20.0)
    assert only(timeline, "B", "recv n0", "communicate").duration_us == pytest.approx(100 + 10 + 1)


def test_pl2_a_plan_that_stops_for_ever_says_who_waits_for_what() -> None:
    crossed = plan(
        {"n0": ("A.f", ""), "n1": ("B.f", ""), "n2": ("A.g", "n1"), "n3": ("B.g", "n0")},
        {"n0": ("A", "B", "shm", 1), "n1": ("B", "A", "shm", 1), "n3": ("B", "driver", "shm", 1)},
        {
            "driver": "read n3; free n3",
            "A": "read n1; run n0; write n0; run n2; free n1",
            "B": "read n0; run n1; write n1; run n3; free n0; write n3",
        },
        ("n3",),
    )
    with pytest.raises(PlanError) as caught:
        simulate(crossed, Workload(), COSTS)
    message = str(caught.value)
    assert message.startswith("PL-2")
    assert "A at 'read n1' of execution 0: waits for 'written n1' of execution 0" in message
    assert "B at 'read n0' of execution 0: waits for 'written n0' of execution 0" in message
    assert "\nhint: " in message


def test_pl3_a_slot_that_is_never_released_stops_the_second_execution() -> None:
    sound = chain(depth=1)
    broken = replace(sound, programs={**sound.programs, "B": actions("read n0; run n1; write n1")})
    assert simulate(broken, CHAIN_WORK, COSTS, 1).makespan_us == pytest.approx(CHAIN_US)
    with pytest.raises(PlanError, match="waits for 'freed n0 by B' of execution 0"):
        simulate(broken, CHAIN_WORK, COSTS, 2)


def test_pl1_a_send_that_nobody_receives_is_an_error() -> None:
    sound = two_sends("@send")
    receiver = actions("recv n0 @recv; run n2; free n0; write n2")
    with pytest.raises(PlanError, match=r"^PL-1: 'n1' of execution 0 has only one end between A and B"):
        simulate(replace(sound, programs={**sound.programs, "B": receiver}), Workload(), COSTS)


@pytest.mark.parametrize(("program", "name"), [("run n7", "node 'n7'"), ("read n7", "channel 'n7'")])
def test_an_action_on_something_unknown_is_an_error(program: str, name: str) -> None:
    broken = replace(chain(), programs={**chain().programs, "A": actions(program)})
    with pytest.raises(PlanError, match=f"A has the action '{program}', but the plan has no {name}"):
        simulate(broken, Workload(), COSTS)


@pytest.mark.parametrize("numbers", [(0, 1), (1, 0), (-1, None)])
def test_counts_start_at_one(numbers: tuple[int, int | None]) -> None:
    with pytest.raises(ValueError, match="hint:"):
        simulate(chain(), Workload(), COSTS, *numbers)


def long_chain(num_nodes: int, num_actors: int = 4) -> Plan:
    """A chain that goes from actor to actor with every node."""
    names = [f"n{number}" for number in range(num_nodes)]
    actor = [f"A{number % num_actors}" for number in range(num_nodes)]
    programs = {f"A{number}": list[str]() for number in range(num_actors)}
    channels = {"i0": ("driver", "A0", "shm", 2)}
    for number, name in enumerate(names):
        value = names[number - 1] if number else "i0"
        programs[actor[number]] += [f"read {value}", f"run {name}", f"free {value}", f"write {name}"]
        channels[name] = (actor[number], actor[number + 1] if number + 1 < num_nodes else "driver", "shm", 2)
    driver = f"write i0; read {names[-1]}; free {names[-1]}"
    return plan(
        {name: (f"{actor[number]}.f", names[number - 1] if number else "i0") for number, name in enumerate(names)},
        channels,
        {"driver": driver, **{name: "; ".join(program) for name, program in programs.items()}},
        (names[-1],),
    )


def test_ten_times_the_nodes_are_ten_times_the_events() -> None:
    events = {}
    for num_nodes in (1_000, 10_000):
        simulation = Simulation(long_chain(num_nodes), Workload(), CostModel(), num_executions=2)
        assert len(simulation.run().of_execution(1).spans) >= 3 * num_nodes
        events[num_nodes] = simulation.num_events
    assert events[10_000] <= 10.5 * events[1_000]
    assert events[10_000] <= 7 * 2 * 10_000
