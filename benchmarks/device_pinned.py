"""How fast is shared host memory for a GPU, by what it is made of, and with two GPUs on it at once?

``python -m benchmarks.device_pinned OUT.json``: two GPUs. 64 MB, one direction, GB/s: pinned by CUDA; a registered ``memfd``; the
same with huge pages asked for; CUDA's own host memory that can be exported as a descriptor. Then in chunks, and up on one GPU
beside down on the other.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from crossfade.device.cuda import CudaDriver
from crossfade.device.cuda_bindings import check
from crossfade.host.memory import Memory, address_of

SIZE = 64 << 20
MB = 1 << 20
MADV_HUGEPAGE = 14


def setup() -> tuple[list[CudaDriver], list[int], list[torch.Tensor]]:
    drivers, streams, tensors = [], [], []
    for device in range(2):
        torch.cuda.set_device(device)
        tensors.append(torch.randint(0, 255, (SIZE,), dtype=torch.uint8, device=f"cuda:{device}"))
        torch.cuda.synchronize()
        drivers.append(CudaDriver(device))
        streams.append(drivers[-1].create_stream("bench"))
    return drivers, streams, tensors


def registered(driver: CudaDriver, *, is_huge: bool) -> int:
    cu = driver._cu
    memory = Memory.create("bench", SIZE + 2 * MB)
    mapping = mmap.mmap(memory.fd, SIZE + 2 * MB)
    KEEP.append(mapping)
    address = address_of(mapping)
    if is_huge:
        libc = ctypes.CDLL(None, use_errno=True)
        libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        print("madvise", libc.madvise(address, SIZE + 2 * MB, MADV_HUGEPAGE), flush=True)
    ctypes.memset(address, 1, SIZE + 2 * MB)
    with driver.current():
        check(cu.cuMemHostRegister(address, SIZE, cu.CU_MEMHOSTREGISTER_PORTABLE), "register")
    return address


KEEP: list[Any] = []


def exportable(driver: CudaDriver) -> int:
    """Host memory of CUDA's own that another process could open by a descriptor."""
    cu = driver._cu
    prop = cu.CUmemAllocationProp()
    prop.type = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    prop.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_HOST_NUMA
    prop.location.id = 0
    prop.requestedHandleTypes = cu.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    kind = cu.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
    with driver.current():
        print("granularity", check(cu.cuMemGetAllocationGranularity(prop, kind), "granularity"), flush=True)
        handle = check(cu.cuMemCreate(SIZE, prop, 0), "cuMemCreate")
        address = check(cu.cuMemAddressReserve(SIZE, 0, 0, 0), "reserve")
        check(cu.cuMemMap(address, SIZE, 0, handle, 0), "map")
        rights = []
        for number in range(2):
            access = cu.CUmemAccessDesc()
            access.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
            access.location.id = number
            access.flags = cu.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
            rights.append(access)
        check(cu.cuMemSetAccess(address, SIZE, rights, len(rights)), "access")
        kind = cu.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        fd = check(cu.cuMemExportToShareableHandle(handle, kind, 0), "export")
        print("descriptor", fd, flush=True)
    return int(address)


def rate(drivers: list[CudaDriver], streams: list[int], act: Callable[[], Any], size: int = SIZE) -> str:
    samples = []
    for _ in range(9):
        begin = time.perf_counter()
        act()
        for driver, stream in zip(drivers, streams, strict=True):
            driver.synchronize(stream)
        samples.append(time.perf_counter() - begin)
    middle = statistics.median(samples[2:])
    return f"{size / middle / 1e9:.1f} GB/s, {middle * 1e6:.0f} us"


def main(path: Path) -> None:
    out: dict[str, Any] = {}
    drivers, streams, tensors = setup()
    names = (
        "/sys/kernel/mm/transparent_hugepage/shmem_enabled",
        "/sys/kernel/mm/transparent_hugepage/enabled",
        "/proc/sys/vm/nr_hugepages",
    )
    for name in names:
        try:
            out[name] = Path(name).read_text().strip()
        except OSError as error:
            out[name] = str(error)
    out["nodes"] = sorted(each.name for each in Path("/sys/devices/system/node").glob("node[0-9]*"))
    pinned = torch.empty(SIZE, dtype=torch.uint8, pin_memory=True)
    kinds: dict[str, Callable[[], int]] = {
        "pinned by CUDA": pinned.data_ptr,
        "registered memfd": lambda: registered(drivers[0], is_huge=False),
        "registered memfd, huge pages asked for": lambda: registered(drivers[0], is_huge=True),
        "exportable host memory of CUDA": lambda: exportable(drivers[0]),
    }
    for kind, make in kinds.items():
        try:
            host = make()
            out[kind] = measure(drivers, streams, [tensor.data_ptr() for tensor in tensors], host)
        except Exception as error:
            out[kind] = repr(error)
        print(kind, json.dumps(out[kind], indent=1), flush=True)
        path.write_text(json.dumps(out, indent=1))
    print(json.dumps(out, indent=1))


def measure(drivers: list[CudaDriver], streams: list[int], tensors: list[int], host: int) -> dict[str, str]:
    up, down = (drivers[0], streams[0], tensors[0]), (drivers[1], streams[1], tensors[1])

    def copies(end: tuple[CudaDriver, int, int], chunk: int, *, is_up: bool, first: int = 0, last: int = SIZE) -> None:
        driver, stream, tensor = end
        for at in range(first, last, chunk):
            ends = (host + at, tensor + at) if is_up else (tensor + at, host + at)
            driver.copy(*ends, chunk, stream)

    def both(chunk: int) -> None:
        half = SIZE // 2
        copies(up, chunk, is_up=True, last=half)
        copies(down, chunk, is_up=False, first=half)

    out = {}
    for chunk in (SIZE, 4 * MB, 2 * MB):
        for name, end in (("up", up), ("down", down)):
            act = partial(copies, end, chunk, is_up=end is up)
            out[f"{name}, chunks of {chunk >> 20} MB"] = rate(drivers, streams, act)
    for chunk in (SIZE // 2, 2 * MB):
        name = f"half up on 0 and half down on 1, chunks of {chunk >> 20} MB"
        out[name] = rate(drivers, streams, partial(both, chunk), SIZE // 2)
    return out


if __name__ == "__main__":
    main(Path(sys.argv[1]))
