"""Which transport carries a value: the table of decision 0011, what cannot be had, and the plans that come of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crossfade.engines.inline import InlineEngine
from crossfade.engines.protocol import ActorSpec
from crossfade.errors import GraphError
from crossfade.graph.check import check
from crossfade.graph.nodes import InputNode, MultiOutputNode
from crossfade.plan.actions import Verb
from crossfade.plan.parse import parse_plan
from crossfade.plan.plan import Plan
from crossfade.plan.text import ring_bytes
from crossfade.schedule.channels import DEVICE_SLOTS
from crossfade.schedule.compile import compile_plan
from crossfade.schedule.transports import Gpus, Way, Wish, choose, gpu_pairs
from crossfade.topology import Device, Link, LinkKind, Rate, Topology
from crossfade.types import DRIVER, TargetDevice, Transport
from tests.helpers.explore import explore
from tests.helpers.small_graphs import actor, call, compiled, gpu_graphs

GOLDEN = Path(__file__).parent.parent / "golden"
ALL = tuple(Transport)
MB = 1_000_000
UUIDS = {0: "GPU-0", 1: "GPU-1", 2: "GPU-2"}
TWO = {"A": (0,), "B": (1,)}


def topology(kind: LinkKind, copy_us: float = 0.0, staged_us: float = 0.0) -> Topology:
    """Three GPUs, all of whose links are of a kind; the given times are of 16 MB, 0 where they were not measured."""
    times = (("copy", copy_us), ("staged", staged_us))
    rates = [Rate(transport, 16 * MB, time_us) for transport, time_us in times if time_us]
    links = [Link(a, b, kind).with_rates(rates) for a in UUIDS.values() for b in UUIDS.values() if a != b]
    return Topology(tuple(Device(uuid, "H200", 132, 10**11) for uuid in UUIDS.values()), tuple(links))


def wish(transport: str = "auto", device: str = "default") -> Wish:
    return Wish(call(actor("A"), "make"), transport, TargetDevice(device))


def chosen(asked: str, gpus: Gpus, device: str = "default", **options: Any) -> str:
    return choose(wish(asked, device), "A", "B", gpus, **options).transport


# The table


@pytest.mark.parametrize("asked", ["auto", "accelerator", "copy", "staged", "nccl", "gloo"])
@pytest.mark.parametrize(("writer", "reader"), [(DRIVER, "A"), ("A", DRIVER)])
def test_the_drivers_values_go_by_shared_memory_whatever_was_asked(asked: str, writer: str, reader: str) -> None:
    assert choose(wish(asked), writer, reader, Gpus({"A": (0,)})) == Way(Transport.SHM)


@pytest.mark.parametrize("of", [{}, {"A": (0,)}, {"B": (0,)}])
def test_auto_is_shared_memory_where_a_party_has_no_gpu(of: dict[str, tuple[int, ...]]) -> None:
    assert chosen("auto", Gpus(of)) == "shm"


@pytest.mark.parametrize("asked", ["auto", "accelerator"])
def test_auto_is_what_reaches_and_is_fastest(asked: str) -> None:
    assert chosen(asked, Gpus(TWO)) == "copy"
    assert chosen(asked, Gpus(TWO, topology(LinkKind.NVLINK))) == "copy"  # nobody knows which these are
    assert chosen(asked, Gpus(TWO, topology(LinkKind.NVLINK), UUIDS)) == "copy"
    assert chosen(asked, Gpus(TWO, topology(LinkKind.NVLINK, 50.0, 300.0), UUIDS)) == "copy"
    assert chosen(asked, Gpus(TWO, topology(LinkKind.NVLINK, 300.0, 50.0), UUIDS)) == "staged"
    assert chosen(asked, Gpus(TWO, topology(LinkKind.NVLINK, 0.0, 50.0), UUIDS)) == "copy"
    assert chosen(asked, Gpus(TWO, topology(LinkKind.PCIE), UUIDS)) == "staged"
    assert chosen(asked, Gpus(TWO, topology(LinkKind.HOST, 50.0, 300.0), UUIDS)) == "staged"
    assert chosen(asked, Gpus({"A": (0,), "B": (0,)}, topology(LinkKind.HOST), UUIDS)) == "copy"  # one GPU


def test_the_declared_size_is_what_is_compared() -> None:
    rates = (
        Rate("copy", MB, 10.0),
        Rate("copy", 100 * MB, 900.0),
        Rate("staged", MB, 20.0),
        Rate("staged", 100 * MB, 800.0),
    )
    base = topology(LinkKind.NVLINK)
    known = Topology(base.devices, tuple(link.with_rates(rates) for link in base.links))
    assert chosen("auto", Gpus(TWO, known, UUIDS), size_bytes=MB) == "copy"
    assert chosen("auto", Gpus(TWO, known, UUIDS), size_bytes=100 * MB) == "staged"
    assert chosen("auto", Gpus(TWO, known, UUIDS)) == chosen("auto", Gpus(TWO, known, UUIDS), size_bytes=16 * MB)


def test_gpus_of_the_same_position_are_paired() -> None:
    assert gpu_pairs((0, 1), (2, 3)) == [(0, 2), (1, 3)]
    assert gpu_pairs((0, 1), (2,)) == [(0, 2), (1, 2)]
    assert gpu_pairs((0,), (2, 3)) == [(0, 2)]
    assert gpu_pairs((), (2, 3)) == gpu_pairs((0, 1), ()) == []


def test_one_pair_out_of_reach_is_enough() -> None:
    base = topology(LinkKind.NVLINK)
    mixed = base.with_link(Link("GPU-1", "GPU-2", LinkKind.HOST))
    assert chosen("auto", Gpus({"A": (0, 1), "B": (1, 2)}, mixed, UUIDS)) == "staged"
    assert chosen("auto", Gpus({"A": (0, 1), "B": (1,)}, mixed, UUIDS)) == "copy"


@pytest.mark.parametrize("asked", ["shm", "gloo"])
def test_transports_of_the_host_are_for_everybody(asked: str) -> None:
    for of in ({}, {"A": (0,)}, TWO):
        assert chosen(asked, Gpus(of)) == asked


# Devices


def test_where_the_reader_gets_its_tensors() -> None:
    assert choose(wish(device="cpu"), "A", "B", Gpus(TWO)) == Way(Transport.SHM, TargetDevice.CPU)
    assert choose(wish(device="cpu"), "A", "B", Gpus()) == Way(Transport.SHM)  # it has no other
    assert choose(wish(device="cuda"), "A", "B", Gpus(TWO)) == Way(Transport.COPY, TargetDevice.CUDA)
    assert choose(wish(device="cuda"), "A", "B", Gpus({"B": (1,)})) == Way(Transport.SHM, TargetDevice.CUDA)
    assert choose(wish("copy", "cuda"), "A", "B", Gpus()) == Way(Transport.COPY, TargetDevice.CUDA)
    with pytest.raises(GraphError, match=r"A\.make\(\) asks for its tensors on the GPU of B, which has none\nhint: "):
        choose(wish(device="cuda"), "A", "B", Gpus({"A": (0,)}))
    for asked in ("copy", "staged", "nccl"):
        assert choose(wish(asked, "cuda"), "A", "B", Gpus(TWO)) == Way(Transport(asked), TargetDevice.CUDA)
    for of in ({"B": (1,)}, TWO):
        with pytest.raises(
            GraphError, match=r"the transport 'gloo' from A to B, which gives CPU tensors.*\nhint: leave"
        ):
            choose(wish("gloo", "cuda"), "A", "B", Gpus(of))


def test_where_an_actor_gets_the_tensors_of_what_the_driver_gives() -> None:
    for asked in (
        "auto",
        "gloo",
        "copy",
        "accelerator",
    ):  # the transport is not heard: the driver has shared memory only
        for device, wanted in (("default", "default"), ("cpu", "cpu"), ("cuda", "cuda")):
            way = choose(wish(asked, device), DRIVER, "A", Gpus(TWO))
            assert way == Way(Transport.SHM, TargetDevice(wanted))
    assert choose(wish(device="cpu"), DRIVER, "A", Gpus()) == Way(Transport.SHM)  # it has no other
    for asked in ("auto", "copy", "staged"):  # here memory of the host stands for no GPU's
        with pytest.raises(
            GraphError, match=r"A\.make\(\) asks for its tensors on the GPU of A, which has none\nhint: .*num_gpus=1"
        ):
            choose(wish(asked, "cuda"), DRIVER, "A", Gpus({"B": (1,)}))


def test_the_driver_gets_tensors_on_the_cpu() -> None:
    for device in ("default", "cpu"):
        for of in ({}, TWO):
            assert choose(wish(device=device), "A", DRIVER, Gpus(of)) == Way(Transport.SHM)
    with pytest.raises(GraphError, match=r"A\.make\(\) asks .* GPU of the driver, which uses none\nhint: .*reader=..."):
        choose(wish(device="cuda"), "A", DRIVER, Gpus(TWO))


# What cannot be had


@pytest.mark.parametrize("asked", ["accelerator", "copy", "staged", "nccl"])
def test_device_transports_need_a_gpu_on_both_sides(asked: str) -> None:
    for of, who in (({"A": (0,)}, "B has none"), ({"B": (0,)}, "A has none"), ({}, "A and B have none")):
        if asked in ("copy", "staged") and not of:
            assert chosen(asked, Gpus(of)) == asked  # memory of the host stands for that of GPUs
            continue
        with pytest.raises(
            GraphError, match=rf"(?s)A\.make\(\) asks for the transport '{asked}' from A to B.*{who}\nhint: "
        ):
            chosen(asked, Gpus(of))
    with pytest.raises(GraphError, match="and for tensors on the CPU\nhint: "):
        chosen(asked, Gpus(TWO), device="cpu")


def test_forced_transports() -> None:
    known = Gpus(TWO, topology(LinkKind.NVLINK, 10.0, 20.0), UUIDS)
    assert [chosen(asked, known) for asked in ("copy", "staged", "nccl")] == ["copy", "staged", "nccl"]
    for kind in (LinkKind.PCIE, LinkKind.HOST):
        far = Gpus(TWO, topology(kind), UUIDS)
        assert [chosen(asked, far) for asked in ("staged", "nccl")] == ["staged", "nccl"]
        with pytest.raises(
            GraphError, match=rf"GPU-0 and GPU-1, are not connected by NVLink but by {kind}\nhint: 'staged'"
        ):
            chosen("copy", far)


def test_an_edge_that_cannot_be_made_names_its_node() -> None:
    a, b, c = actor("A", 0), actor("B", 1), actor("C")
    made = call(a, "make", InputNode()).with_tensor_transport("nccl")
    with pytest.raises(
        GraphError, match=r"A\.make\(inp\) asks for .*'accelerator' from A to C \(Ray's 'nccl' means that too\)"
    ):
        compiled(MultiOutputNode([call(b, "take", made), call(c, "take", made)]))
    made.with_tensor_transport("auto", reader=c)
    plan = compiled(MultiOutputNode([call(b, "take", made), call(c, "take", made)]))
    assert {spec.id: spec.transport for spec in plan.channels if spec.value == "n0"} == {"n0": "copy", "n0~shm": "shm"}


# Plans


def fan_in(*, transport: str = "auto", **options: Any) -> Plan:
    """Three senders and a receiver, which needs the values in the reverse order."""
    inp = InputNode()
    made = [call(actor(f"S{i}", i), "make", inp).with_tensor_transport(transport) for i in range(3)]
    state: Any = 0
    for value in reversed(made):
        state = call(actor("R", 3), "take", state, value)
    return compiled(state, **options)


def test_a_golden_plan_with_gpus() -> None:
    plan = fan_in()
    file = (GOLDEN / "fan_in_copy.txt").read_text()
    assert str(plan).rstrip() == file.rstrip()
    assert parse_plan(file) == plan


def test_the_size_that_is_set_aside_is_that_of_device_slots() -> None:
    plan = fan_in(buffer_bytes=2 << 20)
    assert "waited for on R's stream compute; 2 slots of 2.0 MiB" in str(plan)
    assert ring_bytes(plan.channel["n0"]) == 4 << 10
    assert ring_bytes(plan.channel["i0"]) == 8 << 20


def test_staged_and_nccl_are_sent_and_received() -> None:
    for transport in (Transport.STAGED, Transport.NCCL):
        plan = fan_in(transport=transport)
        assert {action.verb for action in plan.programs["S0"]} == {Verb.READ, Verb.RUN, Verb.SEND, Verb.FREE}
        assert [str(action) for action in plan.programs["R"][:3]] == [f"recv n{i} @recv +1" for i in (2, 1, 0)]
        assert plan.channel["n0"].slots == 0
        assert f"by {transport}: sent on S0's" in str(plan) or "pushed on S0's" in str(plan)
        assert parse_plan(str(plan)) == plan


def test_a_single_execution_in_flight_still_has_two_slots() -> None:
    spec = fan_in(max_inflight=1).channel["n0"]
    assert (spec.depth, spec.slots, spec.credit) == (1, DEVICE_SLOTS, 1)
    assert fan_in(max_inflight=9).channel["n0"].credit == 2


def test_what_is_made_at_one_step_is_pushed_in_the_order_of_need_before_the_host_writes() -> None:
    a, b = actor("A", 0), actor("B", 1)
    first, second = call(a, "split", InputNode())
    plan = compiled(MultiOutputNode([call(b, "take", call(b, "take", second), first), first, second]))
    writes = [action.target for action in plan.programs["A"] if action.verb is Verb.WRITE]
    assert writes == ["n0.1", "n0.0", "n0.0~shm", "n0.1~shm"]
    assert [plan.channel[name].turn for name in writes] == [0, 1, 0, 0]


def test_readers_that_want_other_devices_have_other_channels() -> None:
    a, readers = actor("A", 0), [actor(f"R{i}", i) for i in (1, 2, 3)]
    made = call(a, "make", InputNode()).with_tensor_transport(device="cpu", reader=readers[0])
    made.with_tensor_transport("copy", device="cuda", reader=readers[1])
    plan = compiled(MultiOutputNode([call(reader, "take", made) for reader in readers]))
    found = {spec.id: (spec.readers, spec.transport, spec.device) for spec in plan.channels if spec.value == "n0"}
    assert found == {
        "n0": (("R1",), "shm", "cpu"),
        "n0~copy-cuda": (("R2",), "copy", "cuda"),
        "n0~copy": (("R3",), "copy", "default"),
    }
    assert parse_plan(str(plan)) == plan


def devices_of(plan: Plan, value: str) -> dict[str, tuple[tuple[str, ...], str]]:
    """Who reads which of a value's channels, and where the tensors are wanted."""
    return {spec.id: (spec.readers, str(spec.device)) for spec in plan.channels if spec.value == value}


def test_parts_of_the_input_go_where_the_whole_is_asked_to_unless_they_say_otherwise() -> None:
    inp, a = InputNode().with_tensor_transport(device="cuda"), actor("A", 0)
    plan = compiled(call(a, "take", inp, inp.x, inp["y"].with_tensor_transport(device="cpu")))
    assert {item.key: devices_of(plan, item.value) for item in plan.inputs} == {
        "*": {"i0": (("A",), "cuda")},
        ".x": {"i1": (("A",), "cuda")},
        '["y"]': {"i2": (("A",), "cpu")},
    }
    assert parse_plan(str(plan)) == plan
    inp = InputNode()
    plan = compiled(call(a, "take", inp.x.with_tensor_transport(device="cuda"), inp[0]))
    assert devices_of(plan, "i0") == {"i0": (("A",), "cuda")}
    assert devices_of(plan, "i1") == {"i1": (("A",), "default")}


def test_an_input_may_be_wanted_on_the_gpu_by_some_of_its_readers() -> None:
    """One ring serves those who have no GPU too; who has one and does not want the tensors there has a ring of its own."""
    on, off, without = actor("A", 0), actor("B", 1), actor("C")
    inp = InputNode().with_tensor_transport(device="cuda", reader=on)
    first = compiled(MultiOutputNode([call(on, "take", inp), call(without, "take", inp)]))
    assert devices_of(first, "i0") == {"i0": (("A", "C"), "cuda")}
    second = compiled(MultiOutputNode([call(without, "take", inp), call(on, "take", inp)]))
    assert devices_of(second, "i0") == {"i0": (("A", "C"), "cuda")}
    third = compiled(MultiOutputNode([call(without, "take", inp), call(on, "take", inp), call(off, "take", inp)]))
    assert devices_of(third, "i0") == {"i0": (("C", "B"), "default"), "i0~shm-cuda": (("A",), "cuda")}
    assert [str(action) for action in third.programs[DRIVER][:2]] == ["write i0", "write i0~shm-cuda"]
    for plan in (first, second, third):
        assert parse_plan(str(plan)) == plan
        assert explore(plan).verdict == "ok"
    made = call(actor("D", 2), "make", inp).with_tensor_transport("shm", device="cpu", reader=off)
    inp.with_tensor_transport()
    plan = compiled(MultiOutputNode([call(off, "take", made), made]))
    assert devices_of(plan, "n0") == {"n0": (("B", DRIVER), "cpu")}


def test_an_input_that_cannot_be_on_a_gpu_names_itself() -> None:
    both = actor("A", 0), actor("C")
    inputs = [InputNode().with_tensor_transport(device="cuda") for _ in range(2)]
    for source, said in ((inputs[0], "inp"), (inputs[1].x, r"inp\.x")):
        with pytest.raises(GraphError, match=rf"^{said} asks for its tensors on the GPU of C, which has none\nhint: "):
            compiled(MultiOutputNode([call(each, "take", source) for each in both]))
    inputs[1].with_tensor_transport(reader=both[1])
    assert compiled(MultiOutputNode([call(each, "take", inputs[1].x) for each in both])).channel["i0"].device == "cuda"


@given(output=gpu_graphs(), overlap=st.booleans(), max_inflight=st.integers(1, 2))
def test_pl2_plans_with_gpus_are_sound_by_the_exhaustive_search_too(
    output: MultiOutputNode, overlap: bool, max_inflight: int
) -> None:
    plan = compiled(output, overlap=overlap, max_inflight=max_inflight)
    assert parse_plan(str(plan)) == plan
    assert explore(plan).verdict == "ok"


class Adder:
    def make(self, *values: int) -> int:
        return sum(values) + 1

    def split(self, *values: int) -> tuple[int, int]:
        return sum(values) + 1, sum(values) + 2


@given(output=gpu_graphs(), overlap=st.booleans(), depth=st.integers(1, 3))
def test_pl4_the_inline_engine_runs_plans_with_device_channels(
    output: MultiOutputNode, overlap: bool, depth: int
) -> None:
    checked = check(output, session="s", transports=ALL)
    plan, calls = compile_plan(checked, max_inflight=depth, overlap=overlap)
    known: dict[str, int] = {value.value: 10 for value in plan.inputs}
    for node in plan.nodes:
        total = sum(known[value] for value in node.inputs)
        known.update({value: total + 1 + index for index, value in enumerate(node.outputs)})
    engine = InlineEngine()
    for name in plan.programs:
        if name != DRIVER:
            engine.start_actor(ActorSpec(name, Adder, gpus=plan.devices.get(name, ())))
    opened = engine.open(plan, calls, record=False)
    expected = {place: known[value] for place, value in enumerate(plan.outputs)}
    for number in range(3):
        assert opened.try_submit([10] * len(plan.inputs))
        found: dict[int, Any] = {}

        def is_whole(number: int = number, found: dict[int, Any] = found) -> bool:
            for execution, places, value in opened.try_collect():
                assert execution == number
                found.update(dict.fromkeys(places, value))
            return len(found) == len(expected)

        assert opened.wait_to_collect(is_whole, 0, None)
        assert found == expected
    engine.close()


@pytest.mark.parametrize(
    ("of", "shared"), [({"A": (0,), "B": (0,)}, 0), ({"A": (0, 1), "B": (2, 1)}, 1), ({"A": (0, 1), "B": (1,)}, 1)]
)
def test_nccl_between_actors_that_share_a_gpu_is_refused(of: dict[str, tuple[int, ...]], shared: int) -> None:
    with pytest.raises(
        GraphError,
        match=rf"'nccl' from A to B, which share GPU {shared}, .*one process of each GPU\nhint: 'auto' takes 'copy'",
    ):
        chosen("nccl", Gpus(of))
    assert [chosen(asked, Gpus(of)) for asked in ("auto", "accelerator", "copy", "staged")] == [
        "copy",
        "copy",
        "copy",
        "staged",
    ]
    assert chosen("nccl", Gpus({"A": (0, 1), "B": (1, 0)})) == "nccl"
