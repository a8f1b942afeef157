"""How the tensors of a collective move, by which actors have GPUs and which of these reach each other; and what that takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crossfade.errors import DeviceError, GraphError
from crossfade.graph.check import check
from crossfade.graph.collectives import bind_collective
from crossfade.graph.nodes import ActorInfo, InputNode, MultiOutputNode, bind
from crossfade.peers.exported import check_links
from crossfade.plan.parse import parse_plan
from crossfade.plan.plan import CollectiveSpec
from crossfade.schedule.collective_costs import Estimate, estimate
from crossfade.schedule.compile import compile_plan
from crossfade.schedule.cost import CostModel
from crossfade.schedule.transports import Gpus, transport_of_collective
from crossfade.topology import Crowd, Device, Launch, Link, LinkKind, Rate, Topology
from crossfade.types import CollectiveKind, ReduceOp, Transport
from tests.helpers.clocked_peers import Ranks, costs_of
from tests.helpers.four_gpus import MB, four_h200


@pytest.mark.parametrize(
    ("asked", "gpus", "chosen"),
    [
        ("auto", {}, "gloo"),
        ("auto", {"A": (0,)}, "gloo"),
        ("auto", {"A": (0,), "B": (1,)}, "copy"),
        ("accelerator", {"A": (0,), "B": (1,)}, "copy"),
        (Transport.NCCL, {"A": (0,), "B": (1,)}, "nccl"),
        ("gloo", {"A": (0,), "B": (1,)}, "gloo"),
        ("copy", {}, "copy"),
    ],
)
def test_how_tensors_move(asked: str, gpus: dict[str, tuple[int, ...]], chosen: str) -> None:
    assert transport_of_collective(asked, ("A", "B"), Gpus(gpus)) == chosen


@pytest.mark.parametrize(("asked", "gpus"), [("accelerator", {}), (Transport.NCCL, {}), ("copy", {"A": (0,)})])
def test_a_transport_that_not_all_parties_can_use(asked: str, gpus: dict[str, tuple[int, ...]]) -> None:
    with pytest.raises(GraphError, match=rf"asks for the transport '{asked}', and .*B has no GPU\nhint: give each"):
        transport_of_collective(asked, ("A", "B"), Gpus(gpus))


UUIDS = {index: f"GPU-{index}" for index in range(4)}


def host(kinds: dict[tuple[int, int], LinkKind], default: LinkKind = LinkKind.NVLINK) -> Topology:
    """Four GPUs; links are of the default kind, but for those named."""
    links = [Link(UUIDS[a], UUIDS[b], kinds.get((a, b), default)) for a in UUIDS for b in UUIDS if a != b]
    return Topology(tuple(Device(uuid, "H200", 132, 10**11) for uuid in UUIDS.values()), tuple(links))


def on(*indices: int, known: Topology | None = None) -> Gpus:
    """A, B and C on these GPUs."""
    return Gpus(dict(zip("ABC", ((index,) for index in indices), strict=False)), known, UUIDS)


@pytest.mark.parametrize("asked", ["auto", "accelerator"])
def test_copies_need_every_pair_of_gpus_to_reach_each_other(asked: str) -> None:
    far = host({(2, 1): LinkKind.HOST})  # one direction is enough
    assert transport_of_collective(asked, "ABC", on(0, 1, 2, known=host({}))) == "copy"
    assert transport_of_collective(asked, "ABC", on(0, 1, 2, known=far)) == "nccl"
    assert transport_of_collective(asked, "CBA", on(0, 1, 2, known=far)) == "nccl"
    assert transport_of_collective(asked, "ABC", on(0, 1, 3, known=far)) == "copy"  # another GPU's links do not count
    assert transport_of_collective(asked, "AB", on(0, 1, 2, known=far)) == "copy"
    assert transport_of_collective(asked, "ABC", on(0, 1, 2, known=host({}, LinkKind.PCIE))) == "nccl"


@pytest.mark.parametrize("asked", ["auto", "accelerator"])
def test_what_was_not_measured_is_taken_to_be_reached(asked: str) -> None:
    far = host({}, LinkKind.HOST)
    assert transport_of_collective(asked, "ABC", on(0, 1, 2)) == "copy"
    assert transport_of_collective(asked, "ABC", on(7, 8, 9, known=far)) == "copy"
    assert transport_of_collective(asked, "AB", on(0, 9, known=far)) == "copy"
    assert transport_of_collective(asked, "AB", on(0, 0, known=far)) == "copy"  # within one GPU


def test_collectives_are_done_on_the_first_gpu_of_each_actor() -> None:
    known = host({(0, 3): LinkKind.HOST})
    assert transport_of_collective("auto", "AB", Gpus({"A": (0, 2), "B": (1, 3)}, known, UUIDS)) == "copy"
    assert transport_of_collective("auto", "AB", Gpus({"A": (0, 2), "B": (3, 1)}, known, UUIDS)) == "nccl"


def test_the_topology_changes_nothing_for_what_is_asked_for_by_name_or_has_no_gpu() -> None:
    far = host({}, LinkKind.HOST)
    assert transport_of_collective(Transport.NCCL, "AB", on(0, 1, known=host({}))) == "nccl"
    assert transport_of_collective("gloo", "AB", on(0, 1, known=far)) == "gloo"
    assert transport_of_collective("auto", "AB", on(0, known=far)) == "gloo"
    assert transport_of_collective("copy", "AB", on(known=far)) == "copy"
    with pytest.raises(
        GraphError,
        match="'copy', and the GPUs of A and B, GPU-0 and GPU-1, are not connected by NVLink but by host\nhint: 'auto'",
    ):
        transport_of_collective("copy", "AB", on(0, 1, known=far))


@given(
    far=st.dictionaries(
        st.sampled_from([(a, b) for a in range(4) for b in range(4) if a != b]), st.sampled_from(LinkKind)
    ),
    indices=st.permutations(range(4)),
    num_actors=st.integers(2, 3),
)
def test_copies_are_chosen_where_the_group_by_copies_opens(
    far: dict[tuple[int, int], LinkKind], indices: list[int], num_actors: int
) -> None:
    """What is decided from the topology, and what the actors look at when they open the group."""
    chosen = transport_of_collective("auto", "ABC"[:num_actors], on(*indices[:num_actors], known=host(far)))
    kinds = {(a, b): far.get((a, b), LinkKind.NVLINK) for a in UUIDS for b in UUIDS if a != b}
    if chosen == "copy":
        check_links(kinds, indices[:num_actors])
    else:
        with pytest.raises(DeviceError, match=r"GPU \d and GPU \d are not linked by NVLink.*\nhint: .* NCCL"):
            check_links(kinds, indices[:num_actors])


def test_gpus_that_neither_copies_nor_nccl_can_serve() -> None:
    with pytest.raises(
        GraphError,
        match=r"(?s)no way for a collective of A, B, C: the GPUs of A and B.* and B and C share GPU 1, .*\nhint: .*gloo",
    ):
        transport_of_collective("auto", "ABC", on(0, 1, 1, known=host({}, LinkKind.PCIE)))


@pytest.mark.parametrize(("kind", "chosen"), [(LinkKind.NVLINK, "copy"), (LinkKind.HOST, "nccl")])
def test_a_plan_says_how_its_collectives_move(kind: LinkKind, chosen: str) -> None:
    a, b = (ActorInfo(name, name, "s", {"grad": 1, "step": 1}, gpus=(k,)) for k, name in enumerate("AB"))
    inp = InputNode()
    sums = bind_collective(CollectiveKind.ALLREDUCE, [bind(each, "grad", (inp,), {}) for each in (a, b)])
    outputs: list[Any] = [bind(where, "step", (each,), {}) for where, each in zip((a, b), sums, strict=True)]
    graph = check(MultiOutputNode(outputs), session="s", transports=("auto",))
    plan, _ = compile_plan(graph, max_inflight=2, topology=host({}, kind), uuids=UUIDS)
    assert f"collective c0 = allreduce(sum) over {chosen}: A(n0) -> c0.0; B(n1) -> c0.1" in str(plan).splitlines()
    assert parse_plan(str(plan)) == plan


ALLGATHER, ALLREDUCE = CollectiveKind.ALLGATHER, CollectiveKind.ALLREDUCE
BROADCAST, REDUCESCATTER = CollectiveKind.BROADCAST, CollectiveKind.REDUCESCATTER
COPY, NCCL = Transport.COPY, Transport.NCCL
KB = 1_000
LARGE = 1 << 30


def spec(kind: CollectiveKind, transport: Transport, op: ReduceOp | None = None, num: int = 4, root: int = 0) -> Any:
    parties = tuple(f"A{rank}" for rank in range(num))
    chosen = (op or ReduceOp.SUM) if kind.reduces else None
    values = tuple((f"n{rank}",) for rank in range(num))
    return CollectiveSpec("c0", kind, chosen, root, transport, parties, values, values)


def topology(num: int = 3, **more: Any) -> Topology:
    """A copy moves 1000 bytes in a microsecond and takes 1 more, NCCL's 500 and takes 4; signals take 3."""
    uuids = [f"GPU-{number}" for number in range(num)]
    rates = [Rate("copy", 1, 1.001), Rate("copy", 10**9, 10**6 + 1.0), Rate("nccl", 1, 4.002)]
    rates.append(Rate("nccl", 10**9, 2 * 10**6 + 4.0))
    links = [Link(a, b, LinkKind.NVLINK, signal_us=3.0).with_rates(rates) for a in uuids for b in uuids if a != b]
    neighbours = tuple(zip(uuids, (*uuids[1:], uuids[0]), strict=True))
    everywhere = {
        "crowds": (Crowd("copy", neighbours, 1 * KB, 2.0),),
        "launches": tuple(Launch(u, o, 0.001) for u in uuids for o in ("copy", "write", "wait", "kernel")),
    }
    devices = tuple(Device(uuid, "H200", 132, 10**11) for uuid in uuids)
    return Topology(devices, tuple(links), **{**everywhere, **more})


COSTS = CostModel(topology=topology(), kernel_us=2.0, memory_gbs=10.0)


def found(kind: CollectiveKind, transport: Transport, *sizes_bytes: int, num: int = 3, **more: Any) -> Estimate:
    costs = more.pop("costs", COSTS)
    buffer_bytes = more.pop("buffer_bytes", LARGE)
    gpus = more.pop("gpus", range(num))
    return estimate(costs, spec(kind, transport, num=num, **more), gpus, sizes_bytes, buffer_bytes=buffer_bytes)


# By hand: of 3, an exchange of p KB takes 2 (1 + p) and 2 signals of 3; a kernel 2 and 0.1 for each KB


@pytest.mark.parametrize(
    ("kind", "size_bytes", "buffer_bytes", "more", "time_us"),
    [
        (ALLGATHER, 90 * KB, LARGE, {}, (2 + 18) + (2 * 91 + 6)),
        (ALLGATHER, 90 * KB, 50 * KB, {}, (2 + 10) + (2 * 51 + 6) + (2 * 41 + 6)),
        (REDUCESCATTER, 90 * KB, LARGE, {}, (2 * 31 + 6) + (2 + 4 * 3)),
        (REDUCESCATTER, 115_200, 76_800, {}, (2 * 26.6 + 6) + (2 * 13.8 + 6) + (2 + 5.12)),  # 25.6 KB is added beside 12.8's copies
        (ALLREDUCE, 900 * KB, LARGE, {}, 2 * (2 * 301 + 6) + (2 + 5 * 30)),
        (ALLREDUCE, 921_600, 460_800, {}, 2 * (2 * 154.6 + 6) + 2 * 2 * 154.6),  # sums are offered beside copies
        (ALLREDUCE, 30 * KB, LARGE, {}, (2 * 31 + 6) + (2 + 4 * 3)),
        (ALLREDUCE, 30 * KB, LARGE, {"op": ReduceOp.AVG}, (2 * 31 + 6) + (2 + 4 * 3) + (2 + 6)),
        (REDUCESCATTER, 90 * KB, LARGE, {"op": ReduceOp.AVG}, (2 * 31 + 6) + (2 + 4 * 3) + (2 + 6)),
        (BROADCAST, 90 * KB, LARGE, {}, (2 + 18) + 2 * 91 + 6),  # two fetch at once, which was not measured
        (BROADCAST, 90 * KB, 50 * KB, {"root": 2}, (2 + 10) + (2 * 51 + 6) + (2 * 41 + 6)),
        (REDUCESCATTER, 90 * KB, LARGE, {"op": ReduceOp.MAX}, 2 * (2 + 6) + (2 * 31 + 6) + 2 * (2 + 9) + (2 + 6)),
    ],
)  # fmt: skip
def test_by_copy_engines(kind: Any, size_bytes: int, buffer_bytes: int, more: Any, time_us: float) -> None:
    got = found(kind, COPY, size_bytes, buffer_bytes=buffer_bytes, **more)
    assert got.time_us == pytest.approx(time_us, rel=1e-4)
    assert got.reason == ""


def test_other_reductions_are_dealt_out_and_gathered() -> None:
    dealt = found(REDUCESCATTER, COPY, 90 * KB, op=ReduceOp.MIN).time_us
    gathered = found(ALLGATHER, COPY, 30 * KB).time_us
    whole = found(ALLREDUCE, COPY, 90 * KB, op=ReduceOp.MIN).time_us
    assert whole == pytest.approx(dealt + gathered + 2 * (2 + 18), rel=1e-4)


def test_small_tensors_travel_together_and_long_ones_by_themselves() -> None:
    together = found(ALLREDUCE, COPY, 10 * KB, 20 * KB, 300 * KB, 900 * KB).time_us
    apart = [found(ALLREDUCE, COPY, size).time_us for size in (30 * KB, 300 * KB, 900 * KB)]
    assert together == pytest.approx(sum(apart))


@pytest.mark.parametrize(
    ("kind", "sent", "copied"),
    [(ALLREDUCE, 4 / 3, 2), (REDUCESCATTER, 2 / 3, 8 / 3), (ALLGATHER, 2, 6), (BROADCAST, 1, 2)],
)
def test_by_nccl(kind: CollectiveKind, sent: float, copied: float) -> None:
    got = found(kind, NCCL, 90 * KB)
    assert got.time_us == pytest.approx((4 + 2 * sent * 90) + (2 + copied * 9), rel=1e-4)
    assert got.reason == ""


@pytest.mark.parametrize("transport", [COPY, NCCL])
@pytest.mark.parametrize("kind", CollectiveKind)
@pytest.mark.parametrize("op", [ReduceOp.AVG, ReduceOp.MAX])
@pytest.mark.parametrize("costs", [COSTS, CostModel()])
def test_one_party_takes_little(transport: Transport, kind: CollectiveKind, op: ReduceOp, costs: CostModel) -> None:
    alone, three = (found(kind, transport, 90 * KB, num=num, op=op, costs=costs).time_us for num in (1, 3))
    assert 0 <= alone <= three


def test_a_host_that_enqueues_slowly_is_what_counts() -> None:
    slow = topology(launches=tuple(Launch("GPU-1", o, 100.0) for o in ("copy", "write", "wait", "kernel")))
    costs = replace(COSTS, topology=slow)
    assert found(ALLREDUCE, COPY, 1 * KB, costs=costs).time_us == 500.0  # two copies, a kernel, a write and a wait
    assert found(ALLREDUCE, NCCL, 1 * KB, costs=costs).time_us < 100.0


# What was not measured


def test_without_a_topology_the_cost_model_s_figures_stand_for_it_and_the_estimate_says_so() -> None:
    costs = CostModel(
        copy_us=5.0, copy_gbs=1.0, nccl_us=7.0, nccl_gbs=0.5, enqueue_us=0.0, kernel_us=0.0, memory_gbs=1e9
    )
    copied, sent = (found(BROADCAST, transport, 9 * KB, num=2, costs=costs) for transport in (COPY, NCCL))
    assert copied.time_us == pytest.approx(14.0)
    assert sent.time_us == pytest.approx(25.0)
    assert (
        "no copy from GPU 0 to GPU 1 and 1 more links in the model's topology: copy_us and copy_gbs stand for it"
        in copied.reason
    )
    assert (
        sent.reason
        == "no nccl from GPU 0 to GPU 1 and 1 more links in the model's topology: nccl_us and nccl_gbs stand for it"
    )


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"crowds": ()}, "no crowd of neighbours in the model's topology"),
        ({"launches": (Launch("GPU-0", "copy", 1.0),)}, "not all launches of its GPUs in the model's topology"),
    ],
)
def test_each_gap_has_its_reason(more: dict[str, Any], said: str) -> None:
    got = found(ALLREDUCE, COPY, 90 * KB, costs=replace(COSTS, topology=topology(**more)))
    assert said in got.reason


def test_links_without_signals_and_a_gpu_with_two_parties_have_theirs() -> None:
    whole = topology()
    silent = replace(whole, links=tuple(replace(link, signal_us=None) for link in whole.links))
    assert (
        "not all signals between its GPUs" in found(ALLREDUCE, COPY, KB, costs=replace(COSTS, topology=silent)).reason
    )
    assert "copies within GPU 1 are not measured" in found(ALLREDUCE, COPY, KB, gpus=(0, 1, 1)).reason


# Against the benchmark's report

MEASURED_MS = [
    (ALLGATHER, 16, 0.202, 0.215),
    (ALLGATHER, 64, 0.700, 0.640),
    (REDUCESCATTER, 16, 0.062, 0.093),
    (REDUCESCATTER, 64, 0.193, 0.209),
    (REDUCESCATTER, 256, 0.690, 0.659),
    (ALLREDUCE, 16, 0.103, 0.148),
    (ALLREDUCE, 64, 0.323, 0.368),
    (ALLREDUCE, 256, 1.223, 1.236),
]
"""Kind, MB, "NCCL" and "default" alone, eager, of benchmarks/reports/peer_collectives_4-nvidia-h200_2026-11-21.md."""


@pytest.mark.parametrize(("kind", "size_mb", "by_nccl_ms", "by_copies_ms"), MEASURED_MS)
def test_four_gpus_took_about_as_long(kind: Any, size_mb: int, by_nccl_ms: float, by_copies_ms: float) -> None:
    """Buffers of 1 GB, and nothing copied around NCCL, as there."""
    costs = CostModel(topology=four_h200())
    bare = replace(costs, kernel_us=0.0, memory_gbs=1e9)
    copied = found(kind, COPY, size_mb * MB, num=4, costs=costs)
    sent = found(kind, NCCL, size_mb * MB, num=4, costs=bare)
    assert copied.time_us == pytest.approx(1e3 * by_copies_ms, rel=0.2)
    assert sent.time_us == pytest.approx(1e3 * by_nccl_ms, rel=0.2)
    assert copied.reason == sent.reason == ""


@given(
    kind=st.sampled_from(CollectiveKind),
    transport=st.sampled_from((COPY, NCCL)),
    sizes=st.lists(st.integers(0, 200 * MB), min_size=2, max_size=2).map(sorted),
    gpus=st.permutations(range(4)).flatmap(lambda order: st.integers(2, 4).map(lambda num: order[:num])),
)
def test_more_bytes_never_take_less(kind: Any, transport: Transport, sizes: list[int], gpus: Sequence[int]) -> None:
    costs = CostModel(topology=four_h200())
    less, more = (
        found(kind, transport, size, num=len(gpus), gpus=gpus, costs=costs, buffer_bytes=32 * MB) for size in sizes
    )
    assert less.time_us <= more.time_us * (1 + 1e-9)
    assert less.reason == ""


# Against the exchanges themselves, on GPUs with a clock and nothing else

LENGTHS = st.sampled_from([64 << 10, 256 << 10, 300 << 10, 1 << 20, 3 << 20, 4 << 20, 9 << 20, 40 << 20])


@given(
    kind=st.sampled_from(CollectiveKind), num=st.integers(2, 4), length=LENGTHS, buffer_mb=st.sampled_from([1, 3, 100])
)
def test_what_the_exchanges_take_is_what_is_reckoned_with(
    kind: CollectiveKind, num: int, length: int, buffer_mb: int
) -> None:
    """Their pieces, rows and additions, whatever the numbers."""
    size_bytes, buffer_bytes = length // (16 * num) * 16 * num, buffer_mb * MB
    lasted_us = Ranks(num, buffer_bytes).lasts_us(kind, size_bytes)
    got = found(kind, COPY, size_bytes, num=num, costs=costs_of(num), buffer_bytes=buffer_bytes)
    assert got.time_us == pytest.approx(lasted_us, rel=0.05)
    assert got.reason == ""
