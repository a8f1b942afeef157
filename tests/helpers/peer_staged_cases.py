"""What each rank of a CPU group does in the tests of staged groups: buffers in memory of the host, sums in a mirror of them."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from crossfade.device.host_driver import HostDriver
from crossfade.errors import DeviceError
from crossfade.peers.collectives import all_reduce_coalesced, reduce_scatter_coalesced
from crossfade.peers.opening import open_group
from tests.helpers.footprint import footprint, held_more
from tests.helpers.peer_cases import expected, make, on_cpu, random_calls, same_bits


def _values(rank: int, num_ranks: int) -> None:
    """Buffers in memory of the host, sums in a mirror of them, as for GPUs that do not reach each other."""
    options: dict[str, Any] = {"device": "cpu", "buffer_bytes": 256 * num_ranks, "num_lanes": 2, "is_staged": True}
    for is_replayable in (False, True):
        group = open_group(**options, is_replayable=is_replayable)
        random_calls(group, 31 * num_ranks, 150)
        shapes, types = (
            [(num_ranks * length, 2) for length in (5, 0, 700, 64)],
            ("float32", "int64", "float16", "float64"),
        )
        for name, function in (("all_reduce", all_reduce_coalesced), ("reduce_scatter", reduce_scatter_coalesced)):
            rows = [
                [make(shape, dtype, 10 * k + i) for i, (shape, dtype) in enumerate(zip(shapes, types, strict=True))]
                for k in range(num_ranks)
            ]
            for i, result in enumerate(function(rows[rank], group)):
                assert same_bits(result, expected(name, [row[i] for row in rows], rank)), (name, i)
        with pytest.raises(DeviceError, match="a staged group has no heap"):
            group.empty(0, dtype=torch.uint8)
        group.close()
    with pytest.raises(ValueError, match="heap_bytes is 64\nhint: a staged group's memory is the host's"):
        open_group(**options, heap_bytes=64)


def _cannot_open(rank: int, num_ranks: int) -> None:
    """The device of one rank refuses: all ranks hear of it, and keep nothing."""

    def refuse(*_: Any) -> int:
        raise DeviceError("no memory is left")

    open_group(device="cpu", buffer_bytes=4096, is_staged=True).close()
    before = footprint(os.getpid())
    with pytest.MonkeyPatch.context() as patched:
        for name in ("allocate", "map_host"):
            if rank == 0:
                patched.setattr(HostDriver, name, refuse)
            with pytest.raises(DeviceError, match="no memory" if rank == 0 else "another rank could not open"):
                open_group(device="cpu", buffer_bytes=4096, is_staged=True)
            patched.undo()
    grown = held_more(before)
    assert not {"num_descriptors", "num_ring_mappings"} & set(grown), grown
    dist.barrier()


CASES = {"values": partial(on_cpu, _values), "cannot open": partial(on_cpu, _cannot_open)}
