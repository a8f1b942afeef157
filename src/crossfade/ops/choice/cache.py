"""What was decided for a bucket of shapes, and the choices on disk: a JSON file for each device, number of ranks and operator, in
the user's cache folder.

A file is read whole, and replaced whole by renaming a new one over it, so it is never half there, whatever is killed when. Who
writes holds a lock on a file beside it, and first reads what others have written meanwhile. Nothing here stops a program: what
cannot be read or written is warned of once and left.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import re
import sys
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from crossfade.files import cache_folder
from crossfade.ops.calls.job import Shape
from crossfade.ops.choice.candidate import Candidate
from crossfade.ops.choice.figures import Figures

FORMAT = 1
"""Of the files; part of their names, so that an older or a newer crossfade has its own."""
_PRODUCTS = "products"
"""In the place of an operator, for what was measured of products."""
LOCK_S, LOOK_S = 5.0, 0.005
"""How long to try for the lock, and how often: a holder that was stopped must not stop all others, and a lock has no limit."""


class Source(StrEnum):
    """How a decision came about."""

    MODEL = "model"
    """Predicted times alone."""
    MEASURED = "measured"


@dataclass(frozen=True, slots=True)
class Decision:
    """Candidates, the best first: a shape of the bucket takes the first one that can do it."""

    order: tuple[Candidate, ...]  # the candidates, at least one
    source: Source  # how they were ranked
    times_us: tuple[tuple[Candidate, float], ...] = ()  # of those that were measured, the slowest rank's median
    notes: tuple[str, ...] = ()  # what was left out and why, as this rank knows it. They stay in the process

    def __post_init__(self) -> None:
        if not self.order:
            raise ValueError("a decision without a candidate\nhint: 'plain' can do everything")
        if not all(math.isfinite(time_us) and time_us > 0 for _, time_us in self.times_us):
            raise ValueError(f"measured times are finite and over 0, and these are {self.times_us!r}")

    def time_us(self, candidate: Candidate) -> float | None:
        """What was measured of a candidate."""
        return dict(self.times_us).get(candidate)

    def to_data(self) -> dict[str, Any]:
        """What JSON can hold, and `from_data` reads."""
        return {
            "order": [str(candidate) for candidate in self.order],
            "source": str(self.source),
            "times_us": {str(candidate): time_us for candidate, time_us in self.times_us},
        }

    @classmethod
    def from_data(cls, data: Any) -> Decision:
        """Reads what `to_data` gave."""
        try:
            if not isinstance(data["order"], list):
                raise TypeError(f"its order is {data['order']!r}")
            return cls(
                tuple(Candidate.parse(text) for text in data["order"]),
                Source(data["source"]),
                tuple((Candidate.parse(text), float(time_us)) for text, time_us in data["times_us"].items()),
            )
        except (KeyError, TypeError, AttributeError, OverflowError) as error:
            raise ValueError(f"this is no decision: {error!r}") from None


def versions() -> str:
    """What a choice depends on beside the shape: crossfade's version, torch's, Triton's and the NVIDIA driver's; ``-`` for none."""
    own = getattr(sys.modules[__name__.partition(".")[0]], "__version__", "-")
    driver = Path("/sys/module/nvidia/version")
    try:
        driver_version = driver.read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        driver_version = "-"
    return (
        f"crossfade {own}, torch {_installed('torch')}, triton {_installed('triton')}, driver {driver_version or '-'}"
    )


def _installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "-"


class Cache:
    """The choices for one kind of device and one number of ranks, in ``folder``, or the user's cache folder. Entries of other
    `versions` are kept and not used.
    """

    def __init__(self, device: str, num_ranks: int, versions: str, folder: Path | None = None) -> None:
        self._device = device
        self._num_ranks = num_ranks
        self._versions = versions
        self._folder = folder
        self._warned: set[str] = set()

    def path(self, operator: str) -> Path:
        """The file with an operator's choices."""
        folder = cache_folder() if self._folder is None else self._folder
        device = re.sub(r"[^A-Za-z0-9.]+", "-", self._device).strip("-.") or "device"
        return folder / f"choices{FORMAT}-{device}-x{self._num_ranks}-{operator}.json"

    def load(self, shape: Shape) -> Decision | None:
        """The decision for a shape's bucket; None if there is none."""
        found = self._get(shape.operator, self._key(shape))
        try:
            return None if found is None else Decision.from_data(found)
        except ValueError as error:
            self._warn(f"the choice for {shape.bucket} in {self.path(shape.operator)} is ignored: {error}")
            return None

    def keep(self, shape: Shape, decision: Decision) -> None:
        """Writes the decision for a shape's bucket, in the place of an older one, beside all others."""
        self._put(shape.operator, self._key(shape), decision.to_data())

    def load_waves(self) -> tuple[tuple[int, float], ...] | None:
        """What was measured of the device's products, as `Figures.waves` has it; None if nothing was."""
        found = self._get(_PRODUCTS, self._versions)
        try:
            return None if found is None else Figures(waves=tuple((int(k), float(us)) for k, us in found)).waves
        except (ValueError, TypeError, OverflowError) as error:
            self._warn(f"the times in {self.path(_PRODUCTS)} are ignored: {str(error).partition(chr(10))[0]}")
            return None

    def keep_waves(self, waves: tuple[tuple[int, float], ...]) -> None:
        """Writes what was measured of the device's products."""
        self._put(_PRODUCTS, self._versions, waves)

    def _get(self, operator: str, key: str) -> Any:
        path = self._path_or_warn(operator)
        if path is None:
            return None
        try:
            return self._read(path, operator).get(key)
        except OSError as error:
            self._warn(f"{path} cannot be read: {error.strerror or error}")
            return None

    def _put(self, operator: str, key: str, data: Any) -> None:
        path = self._path_or_warn(operator)
        if path is None:
            return
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with _locked(path):
                entries = self._read(path, operator)
                entries[key] = data
                _replace(path, json.dumps({**self._head(operator), "choices": entries}, indent=1))
        except OSError as error:
            self._warn(f"choices cannot be kept in {path.parent}: {error.strerror or error}; set CROSSFADE_CACHE_DIR")

    def _path_or_warn(self, operator: str) -> Path | None:
        try:
            return self.path(operator)
        except RuntimeError as error:
            self._warn(f"choices cannot be kept: {error}; set CROSSFADE_CACHE_DIR")
            return None

    def _key(self, shape: Shape) -> str:
        bucket = shape.bucket
        return f"{bucket.m},{bucket.n},{bucket.k} {bucket.dtype} {bucket.layout}; {self._versions}"

    def _head(self, operator: str) -> dict[str, Any]:
        return {"format": FORMAT, "device": self._device, "num_ranks": self._num_ranks, "operator": operator}

    def _read(self, path: Path, operator: str) -> dict[str, Any]:
        """All entries of a file, those of other versions too; none if there is no such file or it is something else."""
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return {}
        except (ValueError, RecursionError):
            self._warn(f"{path} is damaged: it is ignored, and replaced at the next choice")
            return {}
        is_ours = isinstance(data, Mapping) and all(data.get(key) == own for key, own in self._head(operator).items())
        if not is_ours or not isinstance(data.get("choices"), dict):
            self._warn(f"{path} is no file of choices for this device: it is ignored, and replaced at the next choice")
            return {}
        entries: dict[str, Any] = data["choices"]
        return entries

    def _warn(self, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            warnings.warn(message, RuntimeWarning, stacklevel=5)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Holds the lock of a file. It ends with the process at the latest."""
    fd = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        limit = time.monotonic() + LOCK_S
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= limit:
                    raise OSError(f"another process has held {path}.lock for {LOCK_S:g} s") from None
                time.sleep(LOOK_S)
        yield
    finally:
        os.close(fd)


def _replace(path: Path, text: str) -> None:
    """Whole or not at all. Only who holds the lock uses the new file's name, so what a killed one left of it is overwritten."""
    new = f"{path}.new"
    with open(new, "w", encoding="utf-8") as file:
        file.write(f"{text}\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(new, path)
