"""Described clusters: their file, what lies between their GPUs, and where actors go."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from crossfade.cluster import GpuLink, HostGroup, LinkKind, Network, Placement, Rule
from crossfade.errors import GraphError
from crossfade.schedule import links
from crossfade.schedule.cost import CostModel
from crossfade.schedule.placement import place
from crossfade.topology import Topology
from tests.helpers.made_up import MB, measured

GPUS = HostGroup(
    Network(50.0, 15.0, num_nics=2), num_cores=8, num=2, num_gpus=4, gpu_link=GpuLink(400.0, 9.0), name="node"
)
CPUS = HostGroup(Network(5.0, 30.0), num_cores=2, num=2, name="cpu")
BOTH = Topology(hosts=(GPUS, CPUS))

WRITTEN: dict[str, Any] = {
    "version": 1,
    "hosts": [
        {
            "name": "node",
            "num": 2,
            "num_cores": 8,
            "num_gpus": 4,
            "gpu_link": {"gbs": 400.0, "latency_us": 9.0, "kind": "nvlink"},
            "network": {"gbs": 50.0, "latency_us": 15.0, "num_nics": 2},
        },
        {"name": "cpu", "num": 2, "num_cores": 2, "network": {"gbs": 5.0, "latency_us": 30.0}},
    ],
}


def test_what_a_person_writes_is_read_and_comes_back() -> None:
    assert Topology.from_data(WRITTEN) == BOTH
    placed = replace(BOTH, placement=Placement(Rule.SPREAD, {"Loader*": "cpu*"}))
    for each in (BOTH, placed, replace(measured(), hosts=(GPUS,))):
        assert Topology.from_json(each.to_json()) == each
    rule = Topology.from_data({**WRITTEN, "placement": "spread"})
    assert rule.placement == Placement(Rule.SPREAD)
    assert Topology.from_data({**WRITTEN, "hosts": WRITTEN["hosts"][1]}).hosts == (CPUS,)
    assert "hosts" not in measured().to_data()


def _edited(**host: Any) -> dict[str, Any]:
    return {"version": 1, "hosts": [{"num_cores": 2, "network": {"gbs": 5}, **host}]}


@pytest.mark.parametrize(
    ("data", "said", "hint"),
    [
        ({"hosts": []}, "does not say its version", '"version": 1'),
        ({"version": 2, "hosts": []}, "version 2", ""),
        ({"version": 1, "hosts": []}, "has no hosts", "num"),
        ({"version": 1, "hosts": 3}, "hosts[0] is 3", "an object"),
        ({"version": 1, "hosts": {}}, "hosts[0] has no 'network'", "it needs network, num_cores"),
        ({"version": 1, "hosts": {}, "placment": {}}, "'placment'", "did you mean 'placement'?"),
        (_edited(gpus=8), "hosts[0] has 'gpus'", "did you mean 'num_gpus'?"),
        (_edited(num=0), "HostGroup.num is 0", "at least 1"),
        (_edited(num=1.5), "HostGroup.num is 1.5", "whole number"),
        (_edited(num=10**9), "over 100,000", "num"),
        (_edited(name="a b"), "HostGroup.name is 'a b'", "such as node"),
        (_edited(network={"gbs": 0}), "Network.gbs is 0", "more than 0"),
        (_edited(network={"gbs": "5"}), "Network.gbs is '5'", "finite"),
        (_edited(network={"gbs": 5, "latency_us": -1}), "Network.latency_us is -1", "not negative"),
        (_edited(network={"gbs": 5, "num_nics": 0}), "Network.num_nics is 0", "at least 1"),
        (_edited(gpu_link={"gbs": 5, "kind": "string"}), "kind is 'string'", "nvlink, pcie"),
        (_edited(gpu_link={"gbs": 5, "kind": "network"}), "kind is 'network'", "nvlink, pcie or host"),
        ({**_edited(), "placement": "nearest"}, "placement.rule is 'nearest'", "pack, spread"),
        ({**_edited(), "placement": {"hosts": ["a"]}}, "placement.hosts is ['a']", "an object"),
        ({**_edited(), "placement": {"hosts": {"A": 3}}}, "'A': 3", "patterns"),
        ({"version": 1, "hosts": [_edited()["hosts"][0]] * 2}, "two hosts are called 'host0'", "a 'name' of its own"),
    ],
)
def test_mistakes_in_the_file_are_told_with_a_hint(data: Any, said: str, hint: str) -> None:
    with pytest.raises(ValueError, match=r"(?s).") as caught:
        Topology.from_json(json.dumps(data))
    message, _, told = str(caught.value).partition("\nhint: ")
    assert said in message
    assert hint in told


def test_links_within_a_host_and_between_hosts() -> None:
    costs = CostModel(topology=BOTH)
    names = BOTH.cluster.gpu_names
    assert names == [f"node{host}/gpu{gpu}" for host in range(2) for gpu in range(4)]
    assert costs.gpu_uuid(5) == "node1/gpu1"
    near, far = BOTH.link(names[0], names[3]), BOTH.link(names[3], names[4])
    assert (near.kind, far.kind) == (LinkKind.NVLINK, LinkKind.NETWORK)
    assert links.alone_us(BOTH, "copy", names[0], names[3], 400_000) == pytest.approx(9 + 1, rel=1e-6)
    assert links.alone_us(BOTH, "nccl", names[3], names[4], 5_000_000) == pytest.approx(15 + 100, rel=1e-6)
    with pytest.raises(KeyError, match=r"'copy' was not measured"):
        links.alone_us(BOTH, "copy", names[3], names[4], 1)


def test_what_was_measured_on_a_host_stands_for_each_of_the_cluster() -> None:
    cluster = replace(measured(), hosts=(replace(GPUS, num_gpus=3, gpu_link=None),))
    link = cluster.link("node1/gpu0", "node1/gpu1")
    assert link.duration_us("copy", 2 * MB) == measured().links[0].duration_us("copy", 2 * MB)
    assert (link.source, link.target) == ("node1/gpu0", "node1/gpu1")
    more = replace(measured(), hosts=(replace(GPUS, num_gpus=4, gpu_link=None),))
    with pytest.raises(KeyError, match="between GPUs 0 and 3"):
        more.link("node0/gpu0", "node0/gpu3")


def test_nics_are_dealt_out_to_the_gpus() -> None:
    assert [BOTH.cluster.nic_of_gpu(gpu) for gpu in range(4)] == [
        "node0.nic0",
        "node0.nic0",
        "node0.nic1",
        "node0.nic1",
    ]
    one = Topology(hosts=(replace(GPUS, network=Network(5.0)),))
    assert {one.cluster.nic_of_gpu(gpu) for gpu in range(4)} == {"node0"}


def _hosts(topology: Topology, actors: Mapping[str, tuple[int, ...]]) -> dict[str, str]:
    return dict(place(topology, actors).hosts)


def test_actors_fill_one_host_after_another() -> None:
    actors = {f"G{i}": (2 * i, 2 * i + 1) for i in range(3)} | {f"C{i}": () for i in range(9)}
    places = place(BOTH, actors)
    assert [places.hosts[f"G{i}"] for i in range(3)] == ["node0", "node0", "node1"]
    assert places.gpus == {"G0": (0, 1), "G1": (2, 3), "G2": (4, 5)}
    assert [places.hosts[f"C{i}"] for i in range(9)] == ["node0"] * 8 + ["node1"]
    assert places.hosts["driver"] == "node0"


def test_the_gpus_of_an_actor_are_on_one_host() -> None:
    places = place(BOTH, {"A": (0, 1, 2), "B": (3, 4, 5), "C": (6,), "D": (7,)})
    assert places.gpus == {"A": (0, 1, 2), "B": (4, 5, 6), "C": (3,), "D": (7,)}


def test_actors_that_share_a_gpu_share_it_in_the_cluster() -> None:
    spread = replace(BOTH, placement=Placement(Rule.SPREAD))
    places = place(spread, {"A": (0,), "B": (0,), "C": (1,)})
    assert places.gpus == {"A": (0,), "B": (0,), "C": (4,)}


def test_actors_are_spread_by_the_rule() -> None:
    spread = replace(BOTH, placement=Placement(Rule.SPREAD))
    assert list(_hosts(spread, {"A": (0,), "B": (1,), "C": (), "D": ()}).values()) == [
        "node0",
        "node0",
        "node1",
        "cpu0",
        "cpu1",
    ]


def test_actors_are_placed_by_name_and_by_pattern() -> None:
    given = Placement(hosts={"Loader1": "node1", "Loader*": "cpu*", "driver": "cpu1"})
    placed = _hosts(replace(BOTH, placement=given), {f"Loader{i}": () for i in range(7)} | {"Other": ()})
    assert placed == {
        "driver": "cpu1",
        "Loader0": "cpu0",
        "Loader1": "node1",
        "Loader2": "cpu0",
        "Loader3": "cpu1",
        "Loader4": "cpu1",
        "Loader5": "cpu0",  # all cores are taken
        "Loader6": "cpu1",
        "Other": "node0",
    }


@pytest.mark.parametrize(
    ("hosts", "actors", "said"),
    [
        ({}, {"A": (0, 1, 2, 3, 4)}, "no host has room for A, which asks for 5 GPUs: 8 GPUs on 4 hosts"),
        ({"A": "cpu0"}, {"A": (0,)}, "no host has room for A"),
        ({"Loader*": "cpu*"}, {"A": ()}, "placement.hosts names 'Loader\\*', and no actor is called so"),
        ({"A": "cpu7"}, {"A": ()}, "'cpu7', and no host is called so\nhint: did you mean 'cpu1'"),
    ],
)
def test_what_cannot_be_placed_is_refused(hosts: dict[str, str], actors: dict[str, tuple[int, ...]], said: str) -> None:
    with pytest.raises(GraphError, match=said):
        place(replace(BOTH, placement=Placement(hosts=hosts)), actors)
