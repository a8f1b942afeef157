"""The stream on which torch computes, and the kernels that pack and copy tensors.

Imported only where torch is used. ``cuda.bindings`` moves bytes; what needs a kernel (a tensor that is not contiguous, a copy
inside one GPU, where copy engines are slow) is torch's own copy. Loading a kernel waits for the device, and hangs while a stream
waits for a signal of a host that is busy loading: `load_kernels` does it beforehand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache, partial
from typing import TYPE_CHECKING

from crossfade.device.borrowed import torch_or_raise
from crossfade.device.driver import HOST

if TYPE_CHECKING:
    import torch


def current_stream(device: int) -> int:
    """The stream on which torch computes now; 0 for the host, where the caller is the stream."""
    return 0 if device == HOST else _raw_stream()(device)


def stream_getter(device: int) -> Callable[[], int]:
    """`current_stream` of one device, for callers that ask often."""
    return (lambda: 0) if device == HOST else partial(_raw_stream(), device)


@cache
def _raw_stream() -> Callable[[int], int]:
    """What gives the stream's handle without making a stream object, which takes ten times as long."""
    torch = torch_or_raise()
    quick: Callable[[int], int] | None = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    return quick or (lambda device: int(torch.cuda.current_stream(device).cuda_stream))


def load_kernels(dtypes: Iterable[torch.dtype], device: int) -> None:
    """Runs, and thereby loads, torch's copy kernels for tensors of these types that are not contiguous, and waits for them."""
    torch = torch_or_raise()
    for dtype in dtypes:
        for shape in ((8, 8), (4, 4, 4), (2, 2, 2, 2)):
            tensor = torch.zeros(shape, dtype=dtype, device=f"cuda:{device}")
            tensor.transpose(0, -1).contiguous()
            tensor[..., ::2].contiguous()
            torch.empty_like(tensor).copy_(tensor)
    torch.cuda.synchronize(device)
