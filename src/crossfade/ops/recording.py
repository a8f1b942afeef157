"""Work of torch's and ours, captured into CUDA graphs on a stream that is kept for it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from crossfade.device.borrowed import torch_or_raise

if TYPE_CHECKING:
    from crossfade.peers.group import PeerGroup

__all__ = ["Recorder"]


class Recorder:
    """Captures, one at a time, on one stream: torch keeps a workspace of cuBLAS for each stream that ever had a product.

    Args:
        group: on whose device.
    """

    def __init__(self, group: PeerGroup) -> None:
        self._cuda = torch_or_raise().cuda
        self._device = group.home.driver.device
        self._stream: Any = self._cuda.Stream(self._device)

    def capture(self, work: Callable[[], object], pool: Any = None) -> Any:
        """A graph of what ``work`` enqueues, which does not happen now.

        Args:
            work: does so on torch's current stream. What it raises is raised.
            pool: of memory that other graphs use too, none of which runs at the same time; None for a new one.
        """
        graph = self._cuda.CUDAGraph()
        self._stream.wait_stream(self._cuda.current_stream(self._device))
        with self._cuda.stream(self._stream):
            graph.capture_begin(pool, capture_error_mode="thread_local")
            try:
                work()
            except BaseException:
                with suppress(Exception):  # such as work that was not joined: it follows from the error
                    graph.capture_end()
                raise
            graph.capture_end()
        return graph
