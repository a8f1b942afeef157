"""The topology that benchmarks/reports/topology_4-nvidia-h200_2026-11-21.md shows, but for its slowdowns."""

from __future__ import annotations

from itertools import permutations

from crossfade.topology import Crowd, Device, Launch, Link, LinkKind, Rate, Topology

MB = 1 << 20
_SIZES = (4096, 64 << 10, MB, 4 * MB, 16 * MB, 64 * MB, 256 * MB)
_TIMES_US = {"copy": (5.25, 5.44, 7.84, 16.5, 49.0, 176.0, 682.0), "nccl": (16.8, 16.8, 26.0, 42.8, 89.0, 280.0, 767.0)}
_LAUNCHES = {"copy": 4.5, "write": 1.5, "wait": 1.5, "record": 0.6, "wait event": 0.6, "kernel": 15.0}


def four_h200() -> Topology:
    """Four GPUs with NVLink between all."""
    uuids = [f"GPU-{number}" for number in range(4)]
    rates = [
        Rate(transport, size_bytes, time_us)
        for transport, times_us in _TIMES_US.items()
        for size_bytes, time_us in zip(_SIZES, times_us, strict=True)
    ]
    links = [Link(*pair, LinkKind.NVLINK, signal_us=7.7).with_rates(rates) for pair in permutations(uuids, 2)]
    neighbours = tuple(zip(uuids, (*uuids[1:], uuids[0]), strict=True))
    crowds = (
        Crowd("copy", tuple(neighbours), 64 * MB, 176.0 / 0.99),
        Crowd("copy", tuple((uuids[0], uuid) for uuid in uuids[1:]), 64 * MB, 176.0),
        Crowd("nccl", tuple(neighbours), 64 * MB, 280.0 / 0.66),
    )
    launches = [Launch(uuid, operation, time_us) for uuid in uuids for operation, time_us in _LAUNCHES.items()]
    devices = tuple(Device(uuid, "H200", 132, 10**11) for uuid in uuids)
    return Topology(devices, tuple(links), crowds=crowds, launches=tuple(launches))
