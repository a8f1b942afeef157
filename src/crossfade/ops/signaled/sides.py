"""What callbacks of `matmul_signaled` are given, and the streams of torch's on which they enqueue."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from crossfade.device.borrowed import torch_or_raise

if TYPE_CHECKING:
    import torch

_HIGH = -1


class RowGroup(NamedTuple):
    """Rows that are done.

    Attributes:
        number: which group, from 0 on.
        rows: of the product, whose rows are all leading dimensions of ``a``, flattened.
        tensor: these rows of the output, (rows, N).
        stream: torch's current stream in the callback; None on a CPU.
    """

    number: int
    rows: slice
    tensor: torch.Tensor
    stream: torch.cuda.Stream | None


OnGroup = Callable[[RowGroup], object]


class CudaSide:
    """A stream beside the callers' of one lane."""

    def __init__(self, device: int) -> None:
        self._cuda = torch_or_raise().cuda
        self._device = device
        self.stream: torch.cuda.Stream = self._cuda.Stream(device, priority=_HIGH)
        self.handle = int(self.stream.cuda_stream)
        self._last: Any = None

    def is_capturing(self) -> bool:
        """Whether the caller's stream is."""
        return bool(self._cuda.is_current_stream_capturing())

    def begin(self) -> Any:
        """A call begins on torch's current stream, which it gives: behind the last one of this lane, and the stream behind it."""
        main = self._cuda.current_stream(self._device)
        if not self.is_capturing():
            if self._last not in (None, main):
                main.wait_stream(self.stream)
            self._last = main
        self.fork(main)
        return main

    def fork(self, main: Any) -> None:
        """The stream waits for the caller's."""
        self.stream.wait_stream(main)

    def join(self, main: Any) -> None:
        """The caller's waits for the stream."""
        main.wait_stream(self.stream)

    def use(self) -> AbstractContextManager[Any]:
        """The stream is torch's current one."""
        return self._cuda.stream(self.stream)  # type: ignore[no-any-return]


@cache
def side_of(device: int, lane: int) -> CudaSide:
    """The one of a lane, in this process."""
    return CudaSide(device)
