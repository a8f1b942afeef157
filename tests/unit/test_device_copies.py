"""Arithmetic of copies, findings about a machine, topologies."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crossfade.device.capabilities import Facts, Severity, judge, require
from crossfade.device.copies import EDGE_BYTES, cut, stagger
from crossfade.errors import DeviceError
from crossfade.topology import Device, Link, LinkKind, Rate, Slowdown, Topology

ADDRESSES = st.one_of(
    st.tuples(st.integers(0, 64), st.integers(0, 64)),
    st.integers(0, 64).map(lambda address: (address, address + 3 * EDGE_BYTES)),
)
SIZES_BYTES = st.one_of(st.integers(0, 1 << 17), st.integers(1 << 17, 1 << 20))


@given(addresses=ADDRESSES, size_bytes=SIZES_BYTES)
def test_pieces_cover_a_copy_once_in_order(addresses: tuple[int, int], size_bytes: int) -> None:
    target, source = addresses
    pieces = cut(target, source, size_bytes)
    at = 0
    for piece in pieces:
        assert (piece.target, piece.source) == (target + at, source + at)
        assert piece.size_bytes > 0
        at += piece.size_bytes
    assert at == size_bytes
    if (target - source) % EDGE_BYTES == 0 and size_bytes >= 1 << 17:
        long = [piece for piece in pieces if piece.size_bytes >= EDGE_BYTES]
        assert all(piece.target % EDGE_BYTES == 0 for piece in long)


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
def test_in_each_step_all_ranks_have_different_targets(num_ranks: int) -> None:
    orders = [stagger(rank, num_ranks) for rank in range(num_ranks)]
    for rank, order in enumerate(orders):
        assert sorted([*order, rank]) == list(range(num_ranks))
    for step in zip(*orders, strict=True):
        assert len(set(step)) == num_ranks


def facts(**changes: object) -> Facts:
    values = {
        "num_devices": 2,
        "compute_capability": (9, 0),
        "has_stream_memory": True,
        "links": {(0, 1): LinkKind.NVLINK, (1, 0): LinkKind.NVLINK},
        "environment": {
            "NCCL_NVLS_ENABLE": "0",
            "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
            "CUDA_DEVICE_MAX_CONNECTIONS": "32",
        },
    }
    return Facts(**{**values, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "name", "severity"),
    [
        ({"num_devices": 0, "links": {}}, "no-device", Severity.ERROR),
        ({"compute_capability": (7, 5)}, "old-device", Severity.WARNING),
        ({"has_stream_memory": False}, "no-stream-memory", Severity.ERROR),
        ({"links": {(0, 1): LinkKind.HOST}}, "no-peer-access", Severity.WARNING),
        ({"links": {(0, 1): LinkKind.PCIE}}, "pcie", Severity.WARNING),
        ({"environment": {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}}, "one-connection", Severity.ERROR),
        ({"environment": {"CUDA_DEVICE_MAX_CONNECTIONS": "4"}}, "few-connections", Severity.WARNING),
        (
            {"environment": {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}},
            "expandable-segments",
            Severity.NOTE,
        ),
        (
            {"environment": {"PYTORCH_ALLOC_CONF": "a:1, expandable_segments: True"}},
            "expandable-segments",
            Severity.NOTE,
        ),
        ({"environment": {"CUDA_LAUNCH_BLOCKING": "1"}}, "launch-blocking", Severity.ERROR),
        ({"environment": {"NCCL_NVLS_ENABLE": "0"}}, "multicast", Severity.NOTE),
    ],
)
def test_a_finding_is_made_and_says_what_to_do(changes: dict[str, object], name: str, severity: Severity) -> None:
    findings = judge(facts(**changes))
    found = next(finding for finding in findings if finding.name == name)
    assert found.severity is severity
    if severity is Severity.ERROR:
        assert found.hint
        with pytest.raises(DeviceError, match=re.escape(found.message)):
            require([found])
    elif severity is Severity.WARNING:
        with pytest.warns(RuntimeWarning, match=re.escape(found.message)):
            require([found])
    else:
        require([found])


def test_a_good_machine_has_no_findings() -> None:
    assert judge(facts()) == []


def test_errors_come_first() -> None:
    findings = judge(facts(environment={"CUDA_DEVICE_MAX_CONNECTIONS": "1"}, links={(0, 1): LinkKind.PCIE}))
    assert [finding.severity for finding in findings] == [Severity.ERROR, Severity.WARNING, Severity.NOTE]


RATES = (Rate("copy", 1 << 20, 12.0), Rate("copy", 1 << 24, 47.0), Rate("nccl", 1 << 20, 32.0))
TOPOLOGY = Topology(
    (Device("GPU-a", "A GPU", 132, 10**11), Device("GPU-b", "A GPU", 132, 10**11)),
    (Link("GPU-a", "GPU-b", LinkKind.NVLINK, RATES), Link("GPU-b", "GPU-a", LinkKind.NVLINK)),
    (Slowdown("nccl", "gemm", 1.74, 1.0),),
)


def test_a_topology_comes_back_from_json() -> None:
    assert Topology.from_json(TOPOLOGY.to_json()) == TOPOLOGY


@pytest.mark.parametrize(
    "text", ["", "{}", "[]", '{"version": 2}', '{"version": 1, "devices": [{}], "links": [], "slowdowns": []}']
)
def test_something_else_is_refused(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        Topology.from_json(text)


def test_durations_between_measured_sizes_are_in_proportion() -> None:
    link = TOPOLOGY.link("GPU-a", "GPU-b")
    assert link.duration_us("copy", 100) == 12.0
    assert link.duration_us("copy", 1 << 24) == 47.0
    assert link.duration_us("copy", 1 << 25) == 94.0
    assert 12.0 < (link.duration_us("copy", 1 << 22) or 0) < 47.0
    assert link.duration_us("staged", 100) is None
    assert link.rates[1].rate_gbs == pytest.approx(357, abs=1)


def test_a_link_is_found_and_replaced() -> None:
    with pytest.raises(KeyError, match="GPU-a, GPU-b"):
        TOPOLOGY.link("GPU-a", "GPU-c")
    changed = TOPOLOGY.with_link(Link("GPU-b", "GPU-a", LinkKind.HOST))
    assert changed.link("GPU-b", "GPU-a").kind is LinkKind.HOST
    assert len(changed.links) == 2
