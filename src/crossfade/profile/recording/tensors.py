"""Which tensors each operator reads and writes, by torch's ExecutionTraceObserver."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_TENSOR = 6  # tensor, storage, offset, number of elements, bytes of one, device


class TensorLog:
    """Collects from `open` to `close`."""

    def __init__(self) -> None:
        self.uses: list[tuple[int, list[int], list[int]]] = []  # as `traces.record` has them
        self._observer: Any = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def open(self, torch: Any) -> None:
        """Begins to observe; the profiler has to run already."""
        self._folder = tempfile.TemporaryDirectory()
        self._observer = torch.profiler.ExecutionTraceObserver()
        self._observer.register_callback(str(self._path))
        self._observer.start()

    def close(self) -> None:
        """Observes no longer, and reads what was written."""
        if self._folder is None:
            return
        self._observer.stop()
        self._observer.unregister_callback()
        self.uses = list(uses_of(json.loads(self._path.read_bytes())))
        self._folder.cleanup()

    @property
    def _path(self) -> Path:
        assert self._folder is not None, "open"
        return Path(self._folder.name, "tensors.json")


def uses_of(execution_trace: dict[str, Any]) -> Iterator[tuple[int, list[int], list[int]]]:
    """The number of each operator that has tensors, and the storages that it reads and writes (views are among both)."""
    for node in execution_trace["nodes"]:
        number = next((attribute["value"] for attribute in node["attrs"] if attribute["name"] == "rf_id"), 0)
        reads, writes = (sorted(set(_storages(node[side]["values"]))) for side in ("inputs", "outputs"))
        if number and (reads or writes):
            yield number, reads, writes


def _storages(values: list[Any]) -> Iterator[int]:
    for value in values:
        if not isinstance(value, list):
            continue
        if len(value) == _TENSOR and isinstance(value[-1], str):
            yield value[1]
        else:
            yield from _storages(value)
