"""How the tensors of a collective move: what was asked, who has GPUs, which of these reach each other."""

from __future__ import annotations

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
from crossfade.schedule.compile import compile_plan
from crossfade.schedule.transports import Gpus, transport_of_collective
from crossfade.topology import Device, Link, LinkKind, Topology
from crossfade.types import CollectiveKind, Transport


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
