"""An actor for tests whose results say what it was called with, in which order."""

from __future__ import annotations

import zlib
from collections import Counter
from typing import Any

import numpy as np

import crossfade


def digest(value: Any) -> int:
    """A number that two equal values share, and hardly any others."""
    if isinstance(value, np.ndarray):
        return zlib.crc32(value.tobytes(), zlib.crc32(f"{value.dtype}{value.shape}".encode()))
    if hasattr(value, "untyped_storage"):  # a tensor, of whatever device; torch may not be there
        data = value.detach().cpu().contiguous().reshape(-1).view(value.new_empty(0).byte().dtype).numpy()
        return zlib.crc32(data.tobytes(), zlib.crc32(f"{value.dtype}{tuple(value.shape)}".encode()))
    if isinstance(value, list | tuple):
        return zlib.crc32(repr((type(value).__name__, [digest(item) for item in value])).encode())
    if isinstance(value, dict):
        return zlib.crc32(repr(sorted((key, digest(item)) for key, item in value.items())).encode())
    return zlib.crc32(repr(value).encode())


def make(kind: str, size_bytes: int, seed: int) -> Any:
    """A value of one of several kinds that follows from the seed."""
    if kind == "int":
        return seed
    if kind == "bytes":
        return seed.to_bytes(4, "little") * (size_bytes // 4)
    array = np.full(size_bytes // 8, seed, dtype=np.int64)
    array[: min(8, array.size)] += np.arange(min(8, array.size))
    if kind == "array":
        return array
    return {"seed": seed, "parts": [array[: array.size // 2], (array[array.size // 2 :], str(seed))]}


class Worker:
    """Counts its calls for each key, so that a call too many, too few or out of order shows in every later result."""

    def __init__(self) -> None:
        self._calls: Counter[str] = Counter()

    def _seed(self, key: str, values: Any) -> int:
        self._calls[key] += 1
        return digest((self._calls[key], values))

    def work(self, key: str, kind: str, size_bytes: int, *values: Any, **named: Any) -> Any:
        """One value made of all that came in."""
        return self._make(kind, size_bytes, self._seed(key, (values, named)))

    def _make(self, kind: str, size_bytes: int, seed: int) -> Any:
        return make(kind, size_bytes, seed)

    @crossfade.method(num_returns=2)
    def split(self, key: str, kind: str, size_bytes: int, *values: Any, **named: Any) -> Any:
        seed = self._seed(key, (values, named))
        return self._make(kind, size_bytes, seed), seed + 1

    def fail_sometimes(self, key: str, kind: str, size_bytes: int, *values: Any, **named: Any) -> Any:
        """Raises for every third seed."""
        seed = self._seed(key, (values, named))
        if seed % 3 == 0:
            raise KeyError(seed)
        return self._make(kind, size_bytes, seed)
