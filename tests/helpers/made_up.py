"""A measured topology that nobody measured: round figures, for arithmetic by hand."""

from __future__ import annotations

from crossfade.topology import Crowd, Device, Launch, Link, LinkKind, Rate, Slowdown, Topology

__all__ = ["MB", "A", "B", "C", "devices", "found", "measured"]

MB = 1 << 20
A, B, C = "GPU-a", "GPU-b", "GPU-c"
RATES = (
    Rate("copy", 1 * MB, 10.0),
    Rate("copy", 3 * MB, 20.0),
    Rate("copy", 64 * MB, 200.0),
    Rate("nccl", 1 * MB, 30.0),
    Rate("nccl", 64 * MB, 300.0),
    Rate("staged", 1 * MB, 60.0),
)


def devices(num: int) -> tuple[Device, ...]:
    return tuple(Device(f"GPU-{letter}", "A GPU", 132, 141 * 10**9) for letter in "abcdefgh"[:num])


def found(num: int, kind: LinkKind = LinkKind.NVLINK) -> Topology:
    """Devices and links, nothing measured."""
    made = devices(num)
    return Topology(made, tuple(Link(a.uuid, b.uuid, kind) for a in made for b in made if a != b))


def measured() -> Topology:
    """Three GPUs."""
    links = tuple(Link(link.source, link.target, link.kind, RATES, 8.0) for link in found(3).links)
    return Topology(
        devices(3),
        links,
        (Slowdown("nccl", "gemm", 1.5, 1.1), Slowdown("copy", "gemm", 1.0, 0.99)),
        (
            Crowd("copy", ((A, B), (A, C)), 64 * MB, 500.0),
            Crowd("copy", ((A, B), (B, C), (C, A)), 64 * MB, 200.0),
            Crowd("nccl", ((B, A), (C, A)), 64 * MB, 450.0),
        ),
        (Launch(A, "copy", 4.0), Launch(A, "kernel", 5.5)),
    )
