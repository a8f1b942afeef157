"""The simulator on plans with GPUs, against times derived by hand."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crossfade.graph.nodes import InputNode, MultiOutputNode
from crossfade.plan.device_streams import stream_in, stream_out
from crossfade.plan.plan import Plan
from crossfade.plan.timeline import Timeline
from crossfade.schedule.simulate import Simulation, simulate
from crossfade.schedule.workload import Workload
from crossfade.topology import Crowd, Device, Link, LinkKind, Rate, Slowdown, Topology
from crossfade.types import Transport
from tests.helpers.small_graphs import ROUND, actor, call, compiled, gpu_graphs, only, times

COSTS = replace(
    ROUND,
    push_host_us=1.0,
    accept_host_us=0.5,
    copy_us=0.0,
    copy_gbs=1.0,
    within_gbs=0.5,
    staged_us=0.0,
    staged_gbs=0.25,
    nccl_us=2.0,
    nccl_gbs=1.0,
    up_us=1.0,
    up_gbs=1.0,
    down_us=2.0,
    down_gbs=1.0,
)
"""Round figures; nobody sleeps, and there is a core for everyone. A copy moves 1000 bytes in a microsecond."""


def chain(*, a: int = 0, b: int = 1, transport: str = "auto", max_inflight: int = 4) -> Plan:
    """driver -> A.f -> B.g -> driver, A and B on a GPU each."""
    made = call(actor("A", a), "f", InputNode()).with_tensor_transport(transport)
    return compiled(call(actor("B", b), "g", made), max_inflight)


WORK = Workload({"f": 1.0, "g": 1.0}, {"n0": 5_000, "n1": 2_000}, device_us={"f": 10.0, "g": 20.0})


def test_the_host_enqueues_and_the_streams_work() -> None:
    """A: write 1, hop, read .5, host 1: kernels from 2.75 to 12.75, pushed for 5. B's host is done long before; its GPU waits."""
    found = simulate(chain(), WORK, COSTS)
    assert times(only(found, "A", "compute", "compute")) == (2.75, 12.75)
    assert times(only(found, "A", "push", "communicate")) == (12.75, 17.75)
    assert times(only(found, "B", "compute", "compute")) == (17.75, 37.75)
    assert times(only(found, "B", "up", "communicate")) == (37.75, 40.75)  # 1 and 2000 bytes
    assert found.makespan_us == pytest.approx(40.75 + 0.25 + 0.5)
    b_host = [
        (span.label, *times(span))
        for span in found.spans
        if (span.actor, span.stream, span.kind) == ("B", "main", "compute")
    ]
    assert b_host == [("run n1", 6.0, 7.0)]  # written at 4.75, a hop, accepted for 1
    assert only(found, "B", "compute", "wait").what == "arrived n0 at B"


def test_a_method_that_looks_at_its_result_holds_up_its_host() -> None:
    found = simulate(chain(), replace(WORK, synchronous=frozenset({"B.g"})), COSTS)
    writes = [span for span in found.spans if (span.actor, span.label, span.kind) == ("B", "write n1", "communicate")]
    assert [(span.stream, *times(span)) for span in writes] == [("main", 37.75, 38.75)]
    waits = [
        (span.what, *times(span))
        for span in found.spans
        if (span.actor, span.stream, span.kind) == ("B", "main", "wait")
    ]
    assert waits == [("written n0", 0.0, 5.0), ("computed n1", 7.0, 37.75)]


def test_actors_of_one_gpu_share_it() -> None:
    """Both kernels would take 10; copies within the GPU are slower."""
    a, b = actor("A", 0), actor("B", 0)
    inp = InputNode()
    plan = compiled(MultiOutputNode([call(a, "f", inp), call(b, "f", inp)]))
    found = simulate(plan, WORK, COSTS)
    assert times(only(found, "A", "compute", "compute")) == (2.75, 22.75)
    assert times(only(found, "B", "compute", "compute")) == (2.75, 22.75)
    within = simulate(chain(b=0), WORK, COSTS)
    assert times(only(within, "A", "push", "communicate")) == (12.75, 22.75)


def topology(**more: Any) -> Topology:
    uuids = [f"GPU-{i}" for i in range(3)]
    links = [
        Link(a, b, LinkKind.NVLINK, signal_us=2.0).with_rates([Rate("copy", 5_000, 8.0), Rate("copy", 10_000, 16.0)])
        for a in uuids
        for b in uuids
        if a != b
    ]
    return Topology(tuple(Device(uuid, "H200", 132, 10**11) for uuid in uuids), tuple(links), **more)


def test_measured_links_and_what_runs_beside_them() -> None:
    alone = simulate(chain(), WORK, replace(COSTS, topology=topology()))
    assert times(only(alone, "A", "push", "communicate")) == (12.75, 22.75)  # 8 and the signal
    slow = replace(COSTS, topology=topology(slowdowns=(Slowdown("copy", "gemm", 2.0, 1.0),)))
    plan = chain()
    found = simulate(plan, WORK, slow, 2, 2)
    assert only(found, "A", "push", "communicate", 1).duration_us == pytest.approx(20.0)  # B computes all the while
    assert only(found, "A", "push", "communicate", 0).duration_us < 20.0


@pytest.mark.parametrize(("crowd_us", "both_us"), [(None, 2.0), (12.0, 1.5)])
def test_two_into_one_share_its_link(crowd_us: float | None, both_us: float) -> None:
    """Without a measured crowd each gets half; with one, what was measured."""
    inp = InputNode()
    made = [call(actor(f"S{i}", i), "make", inp) for i in range(2)]
    plan = compiled(call(actor("R", 2), "take", *made))
    transfers = (("GPU-0", "GPU-2"), ("GPU-1", "GPU-2"))
    crowds = () if crowd_us is None else (Crowd("copy", transfers, 5_000, crowd_us),)
    work = Workload(value_bytes={"n0": 5_000, "n1": 5_000}, device_us={"make": 10.0, "take": 20.0})
    found = simulate(plan, work, replace(COSTS, topology=topology(crowds=crowds)))
    for sender in ("S0", "S1"):
        assert only(found, sender, "push", "communicate").duration_us == pytest.approx(10.0 * both_us)


def fan_in(num_senders: int = 3, **options: Any) -> Plan:
    inp = InputNode()
    made = [call(actor(f"S{i}", i), "make", inp) for i in range(num_senders)]
    state: Any = 0
    for value in made:
        state = call(actor("R", num_senders), "take", state, value)
    return compiled(state, **options)


LARGE = 20_000_000
"""Bytes, which a copy moves in 20,000."""


def three_into_one() -> Plan:
    """R uses what S0, S1 and S2 make, in this order."""
    inp = InputNode()
    return compiled(call(actor("R", 3), "take", *[call(actor(f"S{i}", i), "make", inp) for i in range(3)]))


def run_three(
    made_us: tuple[float, ...] = (100.0, 100.0, 100.0),
    *,
    size_bytes: int = LARGE,
    synchronous: frozenset[str] = frozenset(),
    num_executions: int = 1,
) -> Timeline:
    device_us = {**{f"S{i}.make": time_us for i, time_us in enumerate(made_us)}, "take": 20.0}
    values = {f"n{i}": size_bytes for i in range(3)}
    work = Workload(value_bytes=values, device_us=device_us, synchronous=synchronous)
    return simulate(three_into_one(), work, COSTS, num_executions)


def pushes(found: Timeline, execution: int = 0) -> list[tuple[float, float]]:
    return [times(only(found, f"S{i}", "push", "communicate", execution)) for i in range(3)]


def test_large_values_go_one_after_the_other_in_the_order_of_use() -> None:
    """Each takes 20,000 by itself, and all at once 60,000."""
    found = run_three()
    (begin, first), *rest = pushes(found)
    assert first == begin + 20_000
    assert rest == [(first, first + 20_000), (first + 20_000, first + 40_000)]
    assert only(found, "R", "compute", "compute").start_us == pytest.approx(first + 40_000)
    assert [end - start for start, end in pushes(run_three(size_bytes=10_000_000))] == [30_000.0] * 3


def test_who_is_enqueued_is_waited_for_also_where_its_kernels_take_long() -> None:
    (_, first), *rest = pushes(run_three((50_000.0, 100.0, 100.0)))
    assert rest == [(first, first + 20_000), (first + 20_000, first + 40_000)]


def test_a_host_holds_a_push_for_no_longer_than_it_takes() -> None:
    """S0 looks at what it made, so that its host enqueues late. S1 goes after 20,000, and S2 behind it."""
    found = run_three((50_000.0, 100.0, 100.0), synchronous=frozenset({"S0.make"}))
    first, second, third = pushes(found)
    assert 20_000 < second[0] < 20_010
    assert second[1] == second[0] + 20_000
    assert third[0] == second[1]
    assert 50_000 < first[0] < 50_010
    assert first[1] > first[0] + 25_000  # it shares the link with S2


def test_turns_are_kept_in_every_execution() -> None:
    found = run_three((100.0, 300.0, 200.0), num_executions=6)
    for execution in range(6):
        (_, first), (begin, second), (late, _) = pushes(found, execution)
        assert first <= begin
        assert second <= late


def test_the_receiver_of_the_overlap_program_never_waits_in_the_steady_state() -> None:
    """Its three products take 60; making takes 10, a transfer 15, and all of that is hidden but in the first execution."""
    values = {f"n{i}": 15_000 for i in range(3)}
    work = Workload(value_bytes=values, device_us={"make": 10.0, "take": 20.0}, synchronous=frozenset({"n5"}))
    found = simulate(fan_in(), work, COSTS, 20, 4)
    ends = [
        span.end_us for span in found.spans if (span.stream, span.label, span.kind) == ("compute", "run n5", "compute")
    ]
    steps = [later - earlier for earlier, later in pairwise(ends[2:])]
    assert all(60.0 <= step <= 64.0 for step in steps), steps  # and what the host enqueues after looking
    assert found.wait_us("S0") > 100.0  # the ring's slots hold the senders back


def test_pushes_run_as_far_ahead_as_there_are_slots() -> None:
    """B takes 1000 a value. Its two slots are full at once; the third value waits until the first is let go."""
    work = Workload({"f": 1.0, "g": 1.0}, {"n0": 5_000}, device_us={"f": 10.0, "g": 1_000.0})
    found = simulate(chain(max_inflight=8), work, COSTS, 4, 8)
    starts = [only(found, "A", "push", "communicate", execution).start_us for execution in range(4)]
    first_done_us = only(found, "B", "compute", "compute").end_us
    assert starts[1] < 100.0 < first_done_us <= starts[2] < starts[3]


@pytest.mark.parametrize(("transport", "time_us"), [("staged", 20.0), (Transport.NCCL, 7.0)])
def test_staged_and_nccl_begin_when_the_value_is_there(transport: str, time_us: float) -> None:
    found = simulate(chain(transport=transport), WORK, COSTS)
    out, into = ("up", "down") if transport == "staged" else ("nccl", "nccl")
    (sent,) = [span for span in found.spans if (span.actor, span.stream, span.label) == ("A", out, "send n0")]
    (came,) = [span for span in found.spans if (span.actor, span.stream, span.label) == ("B", into, "recv n0")]
    assert times(sent) == times(came) == (12.75, 12.75 + time_us)
    assert times(only(found, "B", "compute", "compute")) == (12.75 + time_us, 32.75 + time_us)


def on_gpus(plan: Plan) -> set[tuple[str, str, str]]:
    """What moves on the streams of GPUs, as predicted: whose, which stream, which action."""
    work = Workload({}, {}, default_value_bytes=1_000, device_us={"f": 10.0, "g": 10.0})
    spans = simulate(plan, work, COSTS, 3).spans
    hosts = ("main", "get")
    return {(s.actor, s.stream, s.label) for s in spans if s.kind == "communicate" and s.stream not in hosts}


@pytest.mark.parametrize("transport", ["copy", "staged", Transport.NCCL])
def test_the_text_of_a_plan_names_the_streams_of_its_prediction(transport: str) -> None:
    plan = chain(transport=transport)
    (line,) = [line for line in str(plan).splitlines() if line.startswith("# n0: ")]
    said = set(re.findall(r"(\w+)'s stream (\w+)", line))
    shown = {(party, stream) for party, stream, label in on_gpus(plan) if label.endswith(" n0")}
    waited_for = {("B", "compute")} if transport == "copy" else set()
    assert (
        said == shown | waited_for == {("A", stream_out(Transport(transport))), ("B", stream_in(Transport(transport)))}
    )


def test_streams_of_values_from_the_driver_and_to_it() -> None:
    """What it passes stays on the CPU; what it gets was copied there on the stream ``up``."""
    plan = compiled(call(actor("A", 0), "f", InputNode()))
    assert on_gpus(plan) == {("A", "up", "write n0")}
    work = Workload(device_us={"f": 10.0}, synchronous={"f"})
    assert {span.stream for span in simulate(plan, work, COSTS).spans if span.actor == "A"} == {"main", "compute"}


@pytest.mark.parametrize(
    ("device", "wanted"),
    [("default", {("A", "up"), ("B", "down")}), ("cpu", {("A", "up")}), ("cuda", {("A", "up"), ("B", "down")})],
)
def test_streams_of_values_between_gpus_by_shared_memory(device: str, wanted: set[tuple[str, str]]) -> None:
    made = call(actor("A", 0), "f", InputNode()).with_tensor_transport("shm", device=device)
    found = on_gpus(compiled(call(actor("B", 1), "g", made)))
    assert {(party, stream) for party, stream, label in found if label.endswith(" n0")} == wanted


def test_what_is_wanted_on_a_gpu_is_brought_there_beside_its_host() -> None:
    """n0 is written at 3.75 and read at 4.0 for 1; the copy takes 2 and 5."""
    made = call(actor("A"), "f", InputNode()).with_tensor_transport(device="cuda")
    plan = compiled(call(actor("B", 1), "g", made))
    found = simulate(plan, WORK, COSTS)
    written_us = next(s.end_us for s in found.spans if (s.label, s.kind) == ("write n0", "communicate"))
    brought = only(found, "B", "down", "communicate")
    assert brought.label == "read n0"
    assert times(brought) == (written_us + 0.25 + 1.0, written_us + 1.25 + 7.0)
    assert only(found, "B", "compute", "compute").start_us == brought.end_us
    (ran,) = [s for s in found.spans if (s.actor, s.stream, s.kind) == ("B", "main", "compute")]
    assert ran.end_us < brought.end_us
    made = call(actor("A"), "f", InputNode())
    assert on_gpus(compiled(call(actor("B", 1), "g", made))) == {("B", "up", "write n1")}


def test_copies_between_actors_without_a_gpu_cost_what_shared_memory_does() -> None:
    def without_gpus(transport: str) -> Timeline:
        made = call(actor("A"), "f", InputNode()).with_tensor_transport(transport)
        return simulate(compiled(call(actor("B"), "g", made)), WORK, COSTS, 3)

    assert without_gpus("copy") == without_gpus("shm")


def test_several_readers_have_the_value_when_the_last_copy_ends() -> None:
    made = call(actor("A", 0), "f", InputNode())
    plan = compiled(MultiOutputNode([call(actor(f"R{i}", i + 1), "g", made) for i in range(2)]))
    found = simulate(plan, WORK, COSTS)
    pushes = [times(span) for span in found.spans if (span.stream, span.kind) == ("push", "communicate")]
    assert pushes == [(12.75, 17.75), (17.75, 22.75)]
    assert {only(found, f"R{i}", "compute", "compute").start_us for i in range(2)} == {22.75}


def test_transports_between_the_same_actors_do_not_wait_for_each_other() -> None:
    """n0 leaves when its kernels have run, after n1, which the host sends; the reader asks for n0 first."""
    a, b = actor("A", 0), actor("B", 1)
    made = [call(a, "make", InputNode()).with_tensor_transport("staged"), call(a, "f").with_tensor_transport("gloo")]
    found = simulate(compiled(call(b, "g", *made), 1), Workload(device_us={"make": 1e3}), COSTS, 2)
    late, early = (only(found, "B", stream, "communicate") for stream in ("down", "recv"))
    assert (late.label, early.label) == ("recv n0", "recv n1")
    assert early.start_us < early.end_us < late.start_us


@given(output=gpu_graphs(), overlap=st.booleans(), depth=st.integers(1, 4), inflight=st.integers(1, 4))
def test_sound_plans_come_to_their_end(output: MultiOutputNode, overlap: bool, depth: int, inflight: int) -> None:
    plan = compiled(output, depth, overlap=overlap)
    work = Workload(default_compute_us=3.0, default_value_bytes=2_000, device_us={"make": 10.0, "split": 5.0})
    found = simulate(plan, work, COSTS, 4, min(inflight, depth))
    ran = [span for span in found.spans if span.kind == "compute" and span.stream == "main"]
    assert len(ran) == 4 * len(plan.nodes)
    on_gpus = [span for span in found.spans if span.kind == "compute" and span.stream == "compute"]
    assert len(on_gpus) == 4 * sum(node.actor in plan.devices for node in plan.nodes)


def test_the_work_grows_with_the_number_of_executions() -> None:
    def num_events(num_executions: int) -> int:
        simulation = Simulation(fan_in(), WORK, COSTS, num_executions)
        simulation.run()
        return simulation.num_events

    assert num_events(400) < 4.5 * num_events(100)
