"""Settings that compiled graphs have by default: what a program sets in Ray's ``DAGContext``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

_OPTION_OF = {
    "submit_timeout": "submit_timeout",
    "buffer_size_bytes": "buffer_bytes",
    "max_inflight_executions": "max_inflight",
    "overlap_gpu_communication": "overlap",
}


@dataclass
class DAGContext:
    """Defaults for the options of ``compile``, under Ray's names. `get_current` returns the only instance of this process.

    The initial values are this library's own defaults, so there is no hidden time limit, and no environment variable
    (``RAY_CGRAPH_...``) is read. A change applies to graphs that are compiled afterwards.

    Attributes:
        submit_timeout: the longest ``execute`` waits for room, in seconds; None, or Ray's -1, for ever.
        get_timeout: accepted and ignored. Use ``get(timeout=...)``.
        teardown_timeout: accepted and ignored. Use ``teardown(timeout=...)``.
        read_iteration_timeout: accepted and ignored.
        buffer_size_bytes: memory to set aside for each slot of each channel, ``buffer_bytes`` of ``compile``.
        max_inflight_executions: how many executions may be under way.
        max_buffered_results: accepted and ignored.
        overlap_gpu_communication: start receives early, and finish sends late.
    """

    submit_timeout: float | None = None
    get_timeout: float | None = None
    teardown_timeout: float | None = None
    read_iteration_timeout: float = 0.1
    buffer_size_bytes: int = 0
    max_inflight_executions: int = 10
    max_buffered_results: int = 1000
    overlap_gpu_communication: bool = True

    _current: ClassVar[DAGContext | None] = None

    @staticmethod
    def get_current() -> DAGContext:
        """Returns the settings of this process."""
        if DAGContext._current is None:
            DAGContext._current = DAGContext()
        return DAGContext._current

    def options(self) -> Mapping[str, Any]:
        """Returns the settings as options of ``compile``."""
        values = {ours: getattr(self, rays) for rays, ours in _OPTION_OF.items()}
        return {**values, "submit_timeout": None if self.submit_timeout == -1 else self.submit_timeout}
