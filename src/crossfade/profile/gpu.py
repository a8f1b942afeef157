"""The bench of a GPU: torch for work that computes, torch.distributed for NCCL."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

from crossfade.device.borrowed import tensor_on, torch_or_raise
from crossfade.device.cuda import CudaDriver
from crossfade.errors import DeviceError
from crossfade.profile.bench import Exchange
from crossfade.profile.context import BUFFER_BYTES

GEMM_SIZE = 4096
"""Matrix products of this size fill a data-centre GPU; one takes a few hundred microseconds."""
MEMORY_BYTES = 256 << 20
"""Read and written in one pass: several times what the caches hold."""
_PAUSE_S = 50e-6
_JOIN_LIMIT_S = 35.0


class GpuBench:
    """One GPU in this process, by its index as torch counts (see `crossfade.profile.bench.Bench`)."""

    def __init__(self, device: int) -> None:
        torch = self._torch = torch_or_raise()
        torch.cuda.set_device(device)
        self._device = device
        self._where = f"cuda:{device}"
        torch.zeros(1, device=self._where)
        self.driver = CudaDriver(device)
        self._streams: dict[int, Any] = {}
        self._small = torch.zeros(32, device=self._where)
        self._matrices: list[Any] = []
        self._memory: Any = None
        self._buffers: list[Any] = []
        self._has_joined = False
        torch.cuda.synchronize(device)

    def now_us(self) -> float:
        return time.perf_counter_ns() / 1e3

    def pause(self) -> None:
        time.sleep(_PAUSE_S)

    def fill(self, address: int, size_bytes: int) -> None:
        self._torch.randint(
            -(2**62),
            2**62,
            (size_bytes // 8,),
            out=tensor_on(address, (size_bytes // 8,), self._torch.int64, self._device),
        )
        self._torch.cuda.synchronize(self._device)

    def _on(self, stream: int) -> Any:
        if stream not in self._streams:
            self._streams[stream] = self._torch.cuda.ExternalStream(stream, device=self._device)
        return self._torch.cuda.stream(self._streams[stream])

    def work(self, kind: str, stream: int) -> None:
        if kind not in ("gemm", "memory"):
            raise ValueError(f"there is no work {kind!r}: this is a bug in crossfade")
        if kind == "gemm" and not self._matrices:
            self._make_matrices()
        if kind == "memory" and self._memory is None:
            self._memory = self._torch.randn(MEMORY_BYTES // 4, device=self._where)
            self._torch.cuda.synchronize(self._device)
        with self._on(stream):
            if kind == "gemm":
                self._torch.mm(self._matrices[0], self._matrices[1], out=self._matrices[2])
            else:
                self._memory.neg_()

    def _make_matrices(self) -> None:
        shape = (GEMM_SIZE, GEMM_SIZE)
        self._matrices = [self._torch.randn(shape, device=self._where, dtype=self._torch.bfloat16) for _ in range(3)]
        self._torch.cuda.synchronize(self._device)

    def kernel(self, stream: int) -> None:
        with self._on(stream):
            self._small.neg_()

    def join(self, store: str, rank: int, num_ranks: int) -> None:
        import torch.distributed as dist

        if not dist.is_available() or not dist.is_nccl_available():
            raise DeviceError("this torch has no NCCL", hint="copy and staged are measured without it")
        dist.init_process_group(
            "nccl",
            init_method=f"file://{store}",
            rank=rank,
            world_size=num_ranks,
            timeout=timedelta(seconds=_JOIN_LIMIT_S),
            device_id=self._torch.device("cuda", self._device),
        )
        self._has_joined = True
        self._buffers = [
            self._torch.randint(0, 256, (BUFFER_BYTES,), dtype=self._torch.uint8, device=self._where) for _ in range(2)
        ]
        dist.all_reduce(self._small)
        self._torch.cuda.synchronize(self._device)

    def exchange(self, sends: Exchange, receives: Exchange, stream: int) -> None:
        import torch.distributed as dist

        source, target = self._buffers
        ops = [dist.P2POp(dist.isend, source[:size_bytes], rank) for rank, size_bytes in sends]
        ops += [dist.P2POp(dist.irecv, target[:size_bytes], rank) for rank, size_bytes in receives]
        with self._on(stream):
            for work in dist.batch_isend_irecv(ops):
                work.wait()

    def close(self) -> None:
        if self._has_joined:
            import torch.distributed as dist

            dist.destroy_process_group()
            self._has_joined = False
        self._buffers.clear()
        self._matrices.clear()
        self._memory = None
        self.driver.close()
